"""Low-bit optimizers, whose moments are tensors that wrap others, go on exactly after a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from float8_problem import TIMEOUT
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

from accel_core import Accelerator, AccelError, CheckpointError

OPTIMIZERS = {"8bit": AdamW8bit, "4bit": AdamW4bit, "fp8": AdamWFp8}


def parts(kind: str, seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A weight whose moments are quantised, in each half too, and a bias whose moments are not."""
    torch.compile = lambda function, **_: function  # the arithmetic without the compiler
    torch.manual_seed(seed)
    model = nn.Linear(128, 128)
    return model, OPTIMIZERS[kind](model.parameters(), lr=0.01, **options)


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 128, generator=torch.Generator().manual_seed(number))


def by_torch(kind: str, steps: int) -> list[torch.Tensor]:
    """The weights after so many steps of a plain loop that nothing interrupts."""
    model, optimizer = parts(kind)
    for number in range(steps):
        model(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train(
    kind: str,
    strategy: str | None,
    folder: Path,
    numbers: range,
    load: bool,
    plugin: Any = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Train on these batches, alike on all ranks, and return the weights; loads or saves."""
    run = Accelerator(device="cpu", strategy=strategy, kwargs_handlers=[TIMEOUT])
    model, optimizer = run.prepare(*parts(kind, seed=int(load), **options))
    if load:
        run.load_state(folder)
    for number in numbers:
        run.backward(model(batch(number)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if not load:
        run.save_state(folder)
    (unit,) = run.run.units
    weights = [tensor.clone() for _, tensor in unit.hooks.iter_weights(unit, None, None)]
    run.end_training()
    return weights


def stopped_and_resumed(kind: str, strategy: str | None, folder: Path) -> list[torch.Tensor]:
    train(kind, strategy, folder, range(3), False)
    return train(kind, strategy, folder, range(3, 6), True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_process_goes_on_as_a_plain_loop(kind: str, tmp_path: Path) -> None:
    assert all(map(torch.equal, stopped_and_resumed(kind, None, tmp_path), by_torch(kind, 6)))


@pytest.mark.needs("accel-ddp", "accel-fsdp")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("8bit", "ddp"),
        ("8bit", "fsdp"),
        pytest.param("4bit", "fsdp", marks=pytest.mark.full),
        pytest.param("fp8", "fsdp", marks=pytest.mark.full),
    ],
)
def test_two_processes_go_on_as_a_plain_loop(kind: str, strategy: str, tmp_path: Path, run_processes) -> None:
    for weights in run_processes(stopped_and_resumed, kind, strategy, tmp_path, world=2, timeout=200):
        assert all(map(torch.equal, weights, by_torch(kind, 6)))


@pytest.mark.needs("accel-ddp")
@pytest.mark.timeout(300)
def test_moments_of_two_ddp_ranks_are_resumed_by_one_process(tmp_path: Path, run_processes) -> None:
    run_processes(train, "8bit", "ddp", tmp_path, range(3), False, world=2, timeout=200)
    assert all(map(torch.equal, train("8bit", None, tmp_path, range(3, 6), True), by_torch("8bit", 6)))


@pytest.mark.needs("accel-fsdp")
@pytest.mark.timeout(300)
def test_moments_that_another_world_cuts_elsewhere_are_refused_by_name(tmp_path: Path, run_processes) -> None:
    run_processes(train, "4bit", "fsdp", tmp_path, range(3), False, world=2, timeout=200)
    with pytest.raises(
        CheckpointError, match=r"nothing was loaded:\n.*weight/exp_avg was saved as OptimState4bit"
    ):
        train("4bit", None, tmp_path, range(0), True)


def test_moments_of_other_blocks_are_refused_by_name(tmp_path: Path) -> None:
    train("8bit", None, tmp_path, range(1), False)
    with pytest.raises(
        CheckpointError, match=r"weight/exp_avg was saved as .*; resume with the same options"
    ):
        train("8bit", None, tmp_path, range(0), True, block_size=512)


def saves_by_version_1(folder: Path) -> str:
    from accel_fsdp import FullyShardedDataParallelPlugin

    torch.compile = lambda function, **_: function
    run = Accelerator(device="cpu", plugins=[TIMEOUT, FullyShardedDataParallelPlugin(fsdp_version=1)])
    model = nn.Linear(128, 128, bias=False)  # whose halves are whole blocks
    model, optimizer = run.prepare(model, AdamW8bit(model.parameters()))
    run.backward(model(batch(0)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(CheckpointError) as refused:
        run.save_state(folder)
    run.end_training()
    return str(refused.value)


@pytest.mark.needs("accel-fsdp")
@pytest.mark.timeout(300)
def test_moments_of_flat_vectors_are_refused_by_name(tmp_path: Path, run_processes) -> None:
    for said in run_processes(saves_by_version_1, tmp_path, world=2, timeout=200):
        assert "AdamW8bit keeps weight/exp_avg#codes in an encoding of its own" in said
        assert "set fsdp.fsdp_version: 2" in said


def prepares_with_state() -> str:
    model, optimizer = parts("8bit")
    model(batch(0)).square().mean().backward()
    optimizer.step()
    run = Accelerator(device="cpu", strategy="fsdp", kwargs_handlers=[TIMEOUT])
    with pytest.raises(AccelError) as refused:
        run.prepare(model, optimizer)
    run.end_training()
    return str(refused.value)


@pytest.mark.full
@pytest.mark.needs("accel-fsdp")
@pytest.mark.timeout(300)
def test_moments_from_before_prepare_that_are_cut_are_refused_by_name(run_processes) -> None:
    for said in run_processes(prepares_with_state, world=2, timeout=200):
        assert "the AdamW8bit already has state\nweight/exp_avg was saved as OptimState8bit" in said
