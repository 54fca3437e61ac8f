"""Checkpoints keep the average: at another world size and under another strategy too."""

from __future__ import annotations

from pathlib import Path

import ema_problem as problem
import pytest
import torch
from safetensors.torch import load_file

from accel_core import Accelerator
from accel_ema import EMAConfig, averaged


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.needs("accel-ddp")
def test_one_rank_two_ranks_one_rank_go_on_bit_by_bit(tmp_path: Path, run_processes) -> None:
    """All ranks have the same batch, so one arithmetic serves both world sizes."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    expected, weights = problem.continued("single", None, None, 0, 6)
    problem.continued("single", None, first, 0, 2)
    run_processes(problem.continued, "ddp", first, second, 2, 2, world=2)
    found, reached = problem.continued("single", second, None, 4, 2)
    assert same(reached, weights)
    assert same(found, expected)


@pytest.mark.needs("accel-fsdp")
@pytest.mark.parametrize("way", ["fsdp", pytest.param("fsdp-1", marks=pytest.mark.full)])
def test_so_they_do_where_two_ranks_share_the_weights(tmp_path: Path, way: str, run_processes) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    expected, _ = problem.continued("single", None, None, 0, 6)
    problem.continued("single", None, first, 0, 2)
    saved = run_processes(problem.continued, way, first, second, 2, 2, world=2)
    loaded, _ = problem.continued("single", second, None, 4, 0)
    assert all(same(average, loaded) for average, _ in saved)
    found, _ = problem.continued("single", second, None, 4, 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_from_before_the_first_update_is_resumed(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    problem.continued("single", None, folder, 0, 1)
    found, _ = problem.continued("single", folder, None, 1, 3)
    expected, _ = problem.continued("single", None, None, 0, 4)
    assert same(found, expected)


def test_after_a_checkpoint_without_an_average_it_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def prepared(*plugins: object) -> tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer]:
        accelerator = Accelerator(cpu=True, plugins=list(plugins))
        model = torch.nn.Linear(2, 1)
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    accelerator, *_ = prepared()
    accelerator.save_state(tmp_path / "saved")
    accelerator, model, optimizer = prepared(EMAConfig(decay=0.5))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.load_state(tmp_path / "saved")
    assert "has no state of plugin ema, which begins anew" in caplog.text
    loaded = model.weight.clone()
    with averaged(model):
        assert torch.equal(model.weight, loaded)


@pytest.mark.needs("accel-fsdp")
@pytest.mark.parametrize(("way", "world"), [("single", 1), ("fsdp", 2)])
def test_the_average_is_exported_as_a_model(tmp_path: Path, way: str, world: int, run_processes) -> None:
    average = run_processes(problem.exported, way, str(tmp_path), world=world)[0]
    written = load_file(tmp_path / "model.safetensors")
    assert same(written, average)


def test_a_checkpoint_of_two_optimizers_is_loaded_for_one(tmp_path: Path) -> None:
    def prepared(*parts: str) -> tuple[Accelerator, torch.nn.Module, list[torch.optim.Optimizer]]:
        accelerator = Accelerator(cpu=True, plugins=[EMAConfig(decay=0.5, warmup="none")])
        model = torch.nn.Linear(2, 1)
        trained = dict(model.named_parameters())
        groups = [[trained[name] for name in part.split()] for part in parts]
        optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
        model, *optimizers = accelerator.prepare(model, *optimizers)
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            for optimizer in optimizers:
                optimizer.step()
        return accelerator, model, optimizers

    accelerator, model, _ = prepared("weight", "bias")
    accelerator.save_state(tmp_path / "saved")
    with averaged(model):
        expected = {name: each.clone() for name, each in model.state_dict().items()}
    accelerator, model, _ = prepared("weight bias")
    accelerator.load_state(tmp_path / "saved", strict=False)
    with averaged(model):
        assert same(model.state_dict(), expected)
    accelerator.save_state(tmp_path / "again")


def half_frozen(*, frozen: bool) -> tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer]:
    """Prepare two layers of random weights, whose second one is frozen or not."""
    accelerator = Accelerator(cpu=True, plugins=[EMAConfig(decay=0.5, warmup="none")])
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[1].requires_grad_(not frozen)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()


def test_an_average_that_was_not_saved_begins_with_the_loaded_weights(tmp_path: Path) -> None:
    accelerator, model, optimizer = half_frozen(frozen=True)
    train(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    accelerator, model, optimizer = half_frozen(frozen=False)
    accelerator.load_state(tmp_path / "saved", strict=False)
    loaded = model[1].weight.clone()
    with averaged(model):
        assert torch.equal(model[1].weight, loaded)


def test_a_saved_average_of_weights_that_are_frozen_now_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model, optimizer = half_frozen(frozen=False)
    train(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    half_frozen(frozen=True)[0].load_state(tmp_path / "saved")
    assert "the average of 1.bias, 1.weight is left out" in caplog.text
