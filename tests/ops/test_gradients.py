"""Losses over the samples of all ranks: gradients are those of one process, to the last bits of float64."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import Tensor, nn
from torch.nn import functional as F

from accel_core import Accelerator, CollectiveError, InitProcessGroupKwargs, ParallelismConfig, ops
from accel_testing.patience import patience

MINE = 4
"""Samples of a rank in a micro-batch."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def samples(micro_batch: int, world: int) -> tuple[Tensor, Tensor]:
    """Two views of the samples of all ranks, (world * MINE, 6) each."""
    generator = torch.Generator().manual_seed(micro_batch)
    return tuple(torch.randn(2, world * MINE, 6, generator=generator, dtype=torch.float64).unbind())


def scores(x: Tensor, z: Tensor) -> Tensor:
    return F.normalize(x, dim=1) @ F.normalize(z, dim=1).T


def contrast(x: Tensor, z: Tensor) -> Tensor:
    return F.cross_entropy(scores(x, z), torch.arange(len(x)))


def variance(x: Tensor) -> Tensor:
    """A loss by statistics of the batch, as of batch norm or VICReg."""
    mean = x.mean(0)
    return (x - mean).square().mean(0).add(0.1).rsqrt().sum() + mean.square().sum()


# What a rank computes of its own samples, and what one process computes of all.


def of_rows(run: Accelerator, model: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    """Each rank has the rows of its samples, and two forwards."""
    both = run.gather(model(z), gradients=True)
    return F.cross_entropy(scores(model(x), both), torch.arange(MINE) + MINE * run.process_index)


def of_all_pairs(run: Accelerator, model: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    """Only gathered values enter the loss, which is the same on all ranks."""
    views = dict(zip("xz", model(torch.cat([x, z])).chunk(2), strict=True))
    both = run.gather({**views, "number": torch.arange(MINE), "none": None}, gradients=True)
    return contrast(both["x"], both["z"]) + 0 * both["number"].sum()


def of_statistics(run: Accelerator, model: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    x = model(x)
    mean = run.reduce(x.mean(0), "mean", gradients=True)
    spread = ops.reduce((x - mean).square().sum(0), "sum", 1 / (MINE * run.num_processes), gradients=True)
    return spread.add(0.1).rsqrt().sum() + mean.square().sum()


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[nn.Module, Tensor, Tensor], Tensor]]] = {
    "rows": (of_rows, lambda model, x, z: contrast(model(x), model(z))),
    "all pairs": (of_all_pairs, lambda model, x, z: contrast(model(x), model(z))),
    "statistics": (of_statistics, lambda model, x, z: variance(model(x))),
}


def whole(parameter: Tensor) -> Tensor:
    gradient: Any = parameter.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def differences(strategy: str, options: Mapping[str, Any], **sizes: int) -> dict[str, float]:
    """The largest difference to one process, by loss and micro-batches of a window."""
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(20)))
    plugins: list[object] = [limit, ParallelismConfig(**sizes)]
    if strategy == "fsdp":
        from accel_fsdp import FullyShardedDataParallelPlugin

        plugins.append(FullyShardedDataParallelPlugin(**options))
    run = Accelerator(device="cpu", strategy=strategy, plugins=plugins)
    world, own = run.num_processes, slice(MINE * run.process_index, MINE * (run.process_index + 1))
    model = net()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = {}
    for name, (of_a_rank, of_all) in LOSSES.items():
        for size in (1, 3):
            alone = net()
            for number in range(size):
                (of_all(alone, *samples(number, world)) / size).backward()
            for window in run.windows(range(size), model, size=size):
                for number in window:
                    x, z = (view[own] for view in samples(number, world))
                    run.backward(of_a_rank(run, model, x, z))
            pairs = zip(run.unwrap_model(model).parameters(), alone.parameters(), strict=True)
            found[f"{name} of {size}"] = max((whole(p) - q.grad).abs().max().item() for p, q in pairs)
            optimizer.zero_grad()
    run.end_training()
    return found


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.needs("accel-ddp")),
        pytest.param("fsdp", marks=pytest.mark.needs("accel-fsdp")),
    ],
)
def test_the_gradient_is_that_of_one_process_on_the_data_of_all_ranks(strategy, world, run_processes):
    for found in run_processes(differences, strategy, {}, world=world):
        assert len(found) == 6
        assert max(found.values()) < 1e-14, found


def in_two_copies(options: Mapping[str, Any]) -> dict[str, float]:
    return differences("fsdp", options, dp_replicate=2)


@pytest.mark.full
@pytest.mark.needs("accel-fsdp")
def test_it_is_under_hsdp_too(run_processes):
    options = {"sharding_strategy": "HYBRID_SHARD"}
    for found in run_processes(in_two_copies, options, world=4):
        assert max(found.values()) < 1e-14, found


# -- in the collectives themselves -----------------------------------------------------------------


def of_gradients(accelerator: Accelerator) -> tuple[Tensor, Tensor, bool]:
    """Twice differentiated: of a power, gathered."""
    world = accelerator.num_processes
    weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    cubes = accelerator.gather({"all": [weight**3]}, gradients=True)["all"][0]
    (first,) = torch.autograd.grad(cubes.sum(), weight, create_graph=True)  # of the losses of all ranks
    (second,) = torch.autograd.grad(first.sum(), weight)
    return first.detach() / world, second / world, cubes.requires_grad


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.needs("accel-ddp")
def test_gradients_have_gradients(world, run_processes):
    for first, second, requires in ranks(run_processes, of_gradients, world=world):
        assert first.tolist() == [12.0, 27.0]
        assert second.tolist() == [12.0, 18.0]
        assert requires


def of_numbers(accelerator: Accelerator) -> tuple[Any, ...]:
    number = torch.tensor(2.0, requires_grad=True)
    accelerator.gather(number, gradients=True).sum().backward()
    half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    accelerator.reduce(half, "mean", gradients=True).sum().backward()
    return number.grad, half.grad


@pytest.mark.needs("accel-ddp")
def test_a_scalar_and_a_half_have_the_gradients_of_their_own_kind(run_processes):
    for number, half in ranks(run_processes, of_numbers):
        assert torch.equal(number, torch.tensor(2.0))  # each of two ranks' losses
        assert torch.equal(half, torch.ones(3, dtype=torch.bfloat16))


def of_others(accelerator: Accelerator) -> str:
    """Rank 1 calls something else than the backward of the others."""
    weight = torch.ones(2, requires_grad=True)
    gathered = accelerator.gather(weight, gradients=True)
    try:
        gathered.sum().backward() if accelerator.process_index == 0 else accelerator.gather(weight.detach())
    except CollectiveError as error:
        return str(error)
    return ""


@pytest.mark.needs("accel-ddp")
def test_a_backward_that_not_all_ranks_make_is_refused(run_processes):
    for told in ranks(run_processes, of_others):
        assert "rank 0: reduce (sum) of [0] (4,) float32" in told
        assert "rank 1: gather of (2,) float32" in told


@pytest.mark.parametrize("reduction", ["min", "max"])
def test_only_sums_and_means_carry_gradients(reduction):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=f"a sum or mean carries gradients, not '{reduction}'"):
        accelerator.reduce(torch.ones(2), reduction, gradients=True)
    accelerator.end_training()


@contextmanager
def warnings() -> Iterator[list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("accel_core")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def of_what_has_none(accelerator: Accelerator) -> tuple[list[str], bool]:
    weight = torch.ones(2, requires_grad=True)
    with warnings() as told:
        accelerator.gather(weight.detach())
        with torch.no_grad():
            accelerator.gather(weight)
        accelerator.gather_for_metrics(weight)
        assert not told
        for _ in range(3):
            gathered = accelerator.gather(weight)
    return told, gathered.requires_grad


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.needs("accel-ddp")
def test_a_result_without_the_gradient_of_its_input_says_so_once(world, run_processes):
    first, *others = ranks(run_processes, of_what_has_none, world=world)
    (told,) = first[0]
    assert told.startswith("[RANK 0] gather: its input requires a gradient, which the result does not carry")
    assert "gradients=True" in told
    assert not any(told for told, _ in others)
    assert not first[1]
