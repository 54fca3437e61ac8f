"""Each communication hook trains exactly as torch's own, registered by hand."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_problem import accelerator, distance, equal, net, train_ours, train_plainly
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from accel_ddp import DistributedDataParallelKwargs, comm_hooks
from accel_testing.processes import run_processes

POWER = {
    "start_powerSGD_iter": 2,
    "matrix_approximation_rank": 2,
    "min_compression_rate": 0.5,
    "orthogonalization_epsilon": 1e-3,  # in fp16 columns vanish
}


def power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, **POWER)


def reduce_in_bf16(state: Any, bucket: dist.GradBucket) -> Any:
    """What bf16 compression means, spelled out: torch refuses its own on the CPU."""
    compressed = bucket.buffer().to(torch.bfloat16).div_(2)
    future = dist.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


reduce_in_bf16.__annotations__ = {}  # torch compares them, and they are text here

JUDGES: dict[str, Any] = {
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, reduce_in_bf16),
    "power_sgd": lambda: (power_state(), powerSGD_hook.powerSGD_hook),
    "fp16(power_sgd)": lambda: (
        power_state(),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
}


def config(name: str) -> DistributedDataParallelKwargs:
    wrapper, _, hook = name.rpartition("(")
    hook = hook.rstrip(")")
    return DistributedDataParallelKwargs(
        comm_hook=hook,
        comm_wrapper=wrapper or "no",
        comm_state_option=POWER if "power" in hook else {},
    )


def ours(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)  # power SGD draws its first matrices
    return train_ours(config(name))


def judged(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return train_plainly(hook=JUDGES[name])


@pytest.mark.parametrize("name", JUDGES)
def test_a_hook_trains_bitwise_as_torchs_own(name: str) -> None:
    for trained, judge in zip(run_processes(ours, name), run_processes(judged, name), strict=True):
        assert equal(trained, judge)


@pytest.mark.parametrize(
    "name", [*JUDGES, "batched_power_sgd", "bf16(power_sgd)", "bf16(batched_power_sgd)", "bf16(fp16)"]
)
def test_a_hook_compresses_and_still_trains(name: str) -> None:
    trained, plain = run_processes(ours, name), run_processes(train_plainly)

    first, second = [{n: w for n, w in each.items() if "running" not in n} for each in trained]
    assert equal(first, second)
    for each, uncompressed in zip(trained, plain, strict=True):
        assert 0 < distance(each, uncompressed) < 0.2


def waiting_for_a_thread_that_holds_the_state() -> bool:
    run = accelerator(config("power_sgd"))
    model = run.prepare(net())
    held = [comm_hooks._states[model]]
    threading.Timer(0.3, held.clear).start()
    comm_hooks.settle(model)
    waited = not held
    run.end_training()
    return waited


def test_the_end_waits_for_threads_that_are_still_inside_a_hook() -> None:
    assert all(run_processes(waiting_for_a_thread_that_holds_the_state))
