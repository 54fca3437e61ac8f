"""Traffic sees each collective that torch's profiler sees, whoever asks for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accel_testing import Traffic

ROWS, WIDTH = 4, 8


def seen_by_both() -> tuple[list[tuple[str, int]], Counter[str]]:
    """What Traffic counts, and how many collectives of a kind gloo is said to run."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    sharded: Any = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=mesh)
    split = distribute_tensor(torch.ones(ROWS, WIDTH), mesh, [Shard(0)], src_data_rank=None)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile, Traffic() as traffic:
        sharded(torch.ones(ROWS, WIDTH)).sum().backward()
        assert isinstance(split, DTensor)
        split.full_tensor()
        collectives.wait_tensor(collectives.all_reduce(torch.ones(3), "sum", mesh))
        if dist.get_rank():
            dist.send(torch.ones(5), 0)
        else:
            dist.recv(torch.empty(5), 1)
        dist.broadcast(torch.ones(7), 0)
    names = [event.name for event in profile.events() if event.name.startswith("gloo:")]
    dist.destroy_process_group()
    return traffic.calls, Counter(name.removeprefix("gloo:").strip("_") for name in names)


def test_it_counts_collectives_of_modules_tensors_functions_and_backward_with_their_bytes(
    run_processes,
) -> None:
    for rank, (calls, gloos) in enumerate(run_processes(seen_by_both)):
        weights = 4 * WIDTH * WIDTH
        assert calls == [
            ("all_gather", weights),
            ("reduce_scatter", weights),
            ("all_gather", 4 * ROWS * WIDTH),
            ("all_reduce", 4 * 3),
            ("send" if rank else "recv", 4 * 5),
            ("broadcast", 4 * 7),
        ]
        assert gloos.total() == len(calls), gloos
