"""One small problem, and how plain torch trains it: the judge of these tests. Runs in workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from accel_core import Accelerator, InitProcessGroupKwargs
from accel_testing.patience import patience

TIMEOUT = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(20)))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def batches(count: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What rank `rank` reads: (8, 6) inputs and (8, 1) targets."""
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = [torch.randn(8, 6, generator=generator) for _ in range(count)]
    return [(x, x.sum(dim=1, keepdim=True).sin()) for x in inputs]


def accelerator(*configs: Any, **arguments: Any) -> Accelerator:
    return Accelerator(device="cpu", plugins=[TIMEOUT, *configs], **arguments)


@contextmanager
def plain_group() -> Iterator[int]:
    """A process group as plain torch makes it; gives the rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience(20)))
    try:
        yield dist.get_rank()
    finally:
        time.sleep(0.2)  # a thread that still leaves a hook would be the one to destroy the group, and abort
        dist.destroy_process_group()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train_ours(*configs: Any, steps: int = 6, accumulate: int = 1) -> dict[str, torch.Tensor]:
    """The weights after training through accel-core, on ranks that start with different weights."""
    run = accelerator(*configs, gradient_accumulation_steps=accumulate)
    model = net(run.process_index)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(steps, run.process_index):
        with run.accumulate(model):
            run.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    result = weights(run.unwrap_model(model))
    run.end_training()
    return result


def train_plainly(
    arguments: dict[str, Any] | None = None,
    hook: Callable[[], tuple[Any, Any]] | None = None,
    steps: int = 6,
    accumulate: int = 1,
) -> dict[str, torch.Tensor]:
    """The weights after the same training written in plain torch."""
    with plain_group() as rank:
        model = DistributedDataParallel(net(rank), **(arguments or {}))
        if hook is not None:
            model.register_comm_hook(*hook())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(batches(steps, rank), 1):
            boundary = number % accumulate == 0
            records = number == 1 and model.static_graph  # torch must reduce the first backward then
            model.require_backward_grad_sync = boundary or records
            (F.mse_loss(model(x), y) / accumulate).backward()
            if boundary:
                optimizer.step()
                optimizer.zero_grad()
        result = weights(model.module)
        model.reducer = model.logger = None
    return result


def equal(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> bool:
    """Bitwise."""
    return ours.keys() == plain.keys() and all(torch.equal(ours[name], plain[name]) for name in ours)


def distance(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
    """Largest difference of any element."""
    return max((ours[name].double() - plain[name].double()).abs().max().item() for name in ours)


def rank() -> int:
    return int(os.environ["RANK"])
