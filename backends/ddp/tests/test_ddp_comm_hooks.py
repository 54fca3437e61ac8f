"""Each communication hook trains exactly as torch's own, registered by hand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_problem import (
    accelerator,
    batches,
    distance,
    equal,
    net,
    plain_group,
    train_ours,
    train_plainly,
    weights,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_core import GradScalerKwargs
from accel_ddp import DistributedDataParallelKwargs, comm_hooks

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
@pytest.mark.by_default
def test_a_hook_trains_bitwise_as_torchs_own(name: str, run_processes) -> None:
    for trained, judge in zip(run_processes(ours, name), run_processes(judged, name), strict=True):
        assert equal(trained, judge)


@pytest.mark.parametrize(
    "name", [*JUDGES, "batched_power_sgd", "bf16(power_sgd)", "bf16(batched_power_sgd)", "bf16(fp16)"]
)
@pytest.mark.by_default("fp16", "power_sgd")
def test_a_hook_compresses_and_still_trains(name: str, run_processes) -> None:
    trained, plain = run_processes(ours, name), run_processes(train_plainly)

    first, second = [{n: w for n, w in each.items() if "running" not in n} for each in trained]
    assert equal(first, second)
    for each, uncompressed in zip(trained, plain, strict=True):
        assert 0 < distance(each, uncompressed) < 0.2


WIDTH, STEPS = 300, 10


def train_several_buckets(model: Any, optimizer: Any, backward: Any, rank: int) -> None:
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
        backward((model(x) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def several_buckets() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def in_several_buckets() -> dict[str, torch.Tensor]:
    run = accelerator(
        DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option=POWER, bucket_cap_mb=1)
    )
    model, optimizer = run.prepare(*several_buckets())
    train_several_buckets(model, optimizer, run.backward, run.process_index)
    found = weights(run.unwrap_model(model))
    run.end_training()
    return found


def judged_in_several_buckets() -> dict[str, torch.Tensor]:
    """By torch's own hook, one bucket after the other."""

    def hook(state: Any, bucket: Any) -> Any:
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()
        return future

    hook.__annotations__ = {}  # torch compares them, and they are text here
    with plain_group() as rank:
        module, optimizer = several_buckets()
        model = DistributedDataParallel(module, bucket_cap_mb=1)
        model.register_comm_hook(power_state(), hook)
        train_several_buckets(model, optimizer, torch.Tensor.backward, rank)
        model.reducer = model.logger = None
    return weights(module)


def test_buckets_are_compressed_in_the_same_order_on_all_ranks(run_processes) -> None:
    """torch's own hook, whose second all-reduce begins in any thread, ends in an abort here."""
    found, judge = run_processes(in_several_buckets), run_processes(judged_in_several_buckets)
    assert all(equal(each, judge[0]) for each in found)


def overflowing() -> list[bool]:
    """Whether each step was skipped; the fifth loss overflows under fp16's scale, after compression began."""
    run = accelerator(config("power_sgd"), GradScalerKwargs(init_scale=1024.0), mixed_precision="fp16")
    model = net(run.process_index)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for number, (x, y) in enumerate(batches(8, run.process_index)):
        loss = (model(x) - y).square().mean()
        run.backward(loss * 1e6 if number == 4 else loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(bool(optimizer.step_was_skipped))
    run.end_training()
    return found


def test_power_sgd_goes_on_after_a_step_that_overflowed(run_processes) -> None:
    for skipped in run_processes(overflowing):
        assert skipped == [False, False, False, False, True, False, False, False]


def resumed(folder: str, goes_on: bool) -> list[dict[str, torch.Tensor]]:
    """Weights after each of four steps that follow a load: in the run that saved, or in a new one."""
    run = accelerator(
        DistributedDataParallelKwargs(
            comm_hook="power_sgd", comm_state_option={**POWER, "start_powerSGD_iter": 4}
        )
    )
    model = net(run.process_index)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train(numbers: range) -> list[dict[str, torch.Tensor]]:
        found = []
        for x, y in batches(20, run.process_index)[numbers.start : numbers.stop]:
            run.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            found.append(weights(run.unwrap_model(model)))
        return found

    if goes_on:
        train(range(6))
        run.save_state(folder)
        train(range(6, 12))
    run.load_state(folder)
    found = train(range(6, 10))
    run.end_training()
    return found


def uncompressed(folder: str) -> list[dict[str, torch.Tensor]]:
    run = accelerator()
    model = net()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.load_state(folder)
    found = []
    for x, y in batches(20, run.process_index)[6:9]:
        run.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(run.unwrap_model(model)))
    run.end_training()
    return found


def test_a_load_forgets_what_power_sgd_has_kept_of_later_gradients(tmp_path: Path, run_processes) -> None:
    here = run_processes(resumed, str(tmp_path / "state"), True)
    anew = run_processes(resumed, str(tmp_path / "state"), False)
    for first, second in zip(here, anew, strict=True):
        assert all(equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def test_power_sgd_compresses_again_two_steps_after_a_load(tmp_path: Path, run_processes) -> None:
    run_processes(resumed, str(tmp_path / "state"), True)
    found = run_processes(resumed, str(tmp_path / "state"), False)[0]
    plain = run_processes(uncompressed, str(tmp_path / "state"))[0]
    assert [equal(*pair) for pair in zip(found[:3], plain, strict=True)] == [True, True, False]


def after_other_gradients(folder: str, scale: float) -> dict[str, torch.Tensor]:
    """Weights two steps after a load of a run without hook.

    scale: of the gradients before the load.
    """
    run = accelerator(config("power_sgd"))
    model = net(run.process_index)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, (x, y) in enumerate(batches(8, run.process_index)):
        if number == 6:
            run.load_state(folder)
        run.backward((scale if number < 6 else 1) * (model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    found = weights(run.unwrap_model(model))
    run.end_training()
    return found


def saved_without_a_hook(folder: str) -> None:
    run = accelerator()
    model = net()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.save_state(folder)
    run.end_training()


def test_a_load_of_a_run_without_a_hook_forgets_too(tmp_path: Path, run_processes) -> None:
    run_processes(saved_without_a_hook, str(tmp_path / "state"))
    one = run_processes(after_other_gradients, str(tmp_path / "state"), 1.0)
    other = run_processes(after_other_gradients, str(tmp_path / "state"), 0.5)
    for first, second in zip(one, other, strict=True):
        assert equal(first, second)


def waiting_for_a_thread_that_holds_the_state() -> bool:
    run = accelerator(config("power_sgd"))
    model = run.prepare(net())
    held = [comm_hooks._states[model]]
    threading.Timer(0.3, held.clear).start()
    comm_hooks.settle(model)
    waited = not held
    run.end_training()
    return waited


def test_the_end_waits_for_threads_that_are_still_inside_a_hook(run_processes) -> None:
    assert all(run_processes(waiting_for_a_thread_that_holds_the_state))


def steps_with_hooks(hook: str) -> bool:
    run = accelerator(config(hook))
    model = net()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    needed = run.run.units[0].steps.after_step is not None
    run.end_training()
    return needed


def test_only_power_sgd_has_something_to_do_in_each_step(run_processes) -> None:
    assert run_processes(steps_with_hooks, "fp16") == [False, False]
    assert run_processes(steps_with_hooks, "batched_power_sgd") == [True, True]
