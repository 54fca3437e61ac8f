"""Checkpoints keep the average: at another world size and under another strategy too."""

from __future__ import annotations

from pathlib import Path

import ema_problem as problem
import pytest
import torch
from safetensors.torch import load_file

from accel_core import Accelerator
from accel_ema import EMAConfig, averaged
from accel_testing import run_processes


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_one_rank_two_ranks_one_rank_go_on_bit_by_bit(tmp_path: Path) -> None:
    """All ranks have the same batch, so one arithmetic serves both world sizes."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    ((expected, weights),) = run_processes(problem.continued, "single", None, None, 0, 6, world=1)
    run_processes(problem.continued, "single", None, first, 0, 2, world=1)
    run_processes(problem.continued, "ddp", first, second, 2, 2, world=2)
    ((found, reached),) = run_processes(problem.continued, "single", second, None, 4, 2, world=1)
    assert same(reached, weights)
    assert same(found, expected)


@pytest.mark.parametrize("way", ["fsdp", "fsdp-1"])
def test_so_they_do_where_two_ranks_share_the_weights(tmp_path: Path, way: str) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    ((expected, _),) = run_processes(problem.continued, "single", None, None, 0, 6, world=1)
    run_processes(problem.continued, "single", None, first, 0, 2, world=1)
    saved = run_processes(problem.continued, way, first, second, 2, 2, world=2)
    ((loaded, _),) = run_processes(problem.continued, "single", second, None, 4, 0, world=1)
    assert all(same(average, loaded) for average, _ in saved)
    ((found, _),) = run_processes(problem.continued, "single", second, None, 4, 2, world=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_from_before_the_first_update_is_resumed(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    run_processes(problem.continued, "single", None, folder, 0, 1, world=1)
    ((found, _),) = run_processes(problem.continued, "single", folder, None, 1, 3, world=1)
    ((expected, _),) = run_processes(problem.continued, "single", None, None, 0, 4, world=1)
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


@pytest.mark.parametrize(("way", "world"), [("single", 1), ("fsdp", 2)])
def test_the_average_is_exported_as_a_model(tmp_path: Path, way: str, world: int) -> None:
    average = run_processes(problem.exported, way, str(tmp_path), world=world)[0]
    written = load_file(tmp_path / "model.safetensors")
    assert same(written, average)
