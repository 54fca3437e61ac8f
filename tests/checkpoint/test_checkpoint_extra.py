"""Values of the caller's own in a checkpoint, and what a load returns."""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_core import Accelerator, CheckpointError, InitProcessGroupKwargs
from accel_testing.patience import patience

STRATEGIES = [
    pytest.param("ddp", marks=pytest.mark.needs("accel-ddp")),
    pytest.param("fsdp", marks=pytest.mark.needs("accel-fsdp")),
]


def own() -> dict[str, Any]:
    return {
        "best": 0.25,
        "tags": ["a", None, True],
        "nested": {"deep": {"number": 3}},
        "small": torch.arange(3),
        "large": torch.arange(40_000.0).view(200, 200),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }


def prepared(strategy: str | None = None) -> tuple[Accelerator, Any]:
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(20)))
    accelerator = Accelerator(device="cpu", strategy=strategy, kwargs_handlers=[limit])
    model, loader = torch.nn.Linear(2, 1), DataLoader(torch.zeros(24, 2), batch_size=2, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = accelerator.prepare(model, optimizer, loader)
    return accelerator, loader


def saved(strategy: str, folder: str) -> None:
    accelerator, loader = prepared(strategy)
    for number, _ in enumerate(loader, 1):
        if number == 3:
            accelerator.save_state(folder, step=7, metrics={"loss": torch.tensor(0.5)}, extra=own())
    accelerator.end_training()


def loaded(strategy: str, folder: str) -> tuple[Any, ...]:
    accelerator, loader = prepared(strategy)
    found = accelerator.load_state(folder)
    numbers = [number for number, _ in enumerate(loader, loader.batches_done)]
    accelerator.end_training()
    return str(found), found.directory, found.step, dict(found.metrics), dict(found.extra), numbers


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), pytest.param(2, 3, marks=pytest.mark.full)])
def test_what_a_save_was_given_comes_back_at_any_world_size(strategy, before, after, tmp_path, run_processes):
    folder = tmp_path / "saved"
    run_processes(saved, strategy, str(folder), world=before)
    for name, directory, step, metrics, extra, numbers in run_processes(
        loaded, strategy, str(folder), world=after
    ):
        assert (name, directory, step, metrics) == (str(folder), folder, 7, {"loss": 0.5})
        assert list(extra) == list(own())
        for key, value in own().items():
            same = torch.equal(value, extra[key]) if isinstance(value, torch.Tensor) else value == extra[key]
            assert same, key
            assert type(value) is type(extra[key])
        assert numbers == list(range(3 * before // after, 12 // after))


def test_without_any_there_is_nothing_and_nan_is_a_number(tmp_path):
    accelerator, _ = prepared()
    assert accelerator.load_state(tmp_path / "none", missing_ok=True) is None
    accelerator.save_state(tmp_path / "saved", metrics={"loss": math.nan})
    found = accelerator.load_state(tmp_path / "saved")
    accelerator.end_training()
    assert found.extra == {}
    assert math.isnan(found.metrics["loss"])


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (
            {"ok": 1, "deep": {"model": torch.nn.Linear(1, 1)}},
            r"extra\.deep\.model cannot be stored",
        ),
        ({"all": [1, lambda: None]}, r"extra\.all\[1\] cannot be stored: a builtins.function"),
        ({"sparse": torch.eye(2).to_sparse()}, r"extra\.sparse cannot be stored: a tensor of layout"),
    ],
)
def test_anything_else_is_refused_by_name_before_anything_is_written(extra, told, tmp_path):
    accelerator, _ = prepared()
    with pytest.raises(CheckpointError, match=told):
        accelerator.save_state(tmp_path / "saved", extra=extra)
    accelerator.end_training()
    assert not (tmp_path / "saved").exists()


def of_ranks(folder: str) -> tuple[list[str], Any]:
    accelerator, _ = prepared("ddp")
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel_core").addHandler(handler)
    accelerator.save_state(folder, extra={"rank": accelerator.process_index})
    found = accelerator.load_state(folder).extra
    accelerator.end_training()
    return told, found


@pytest.mark.needs("accel-ddp")
def test_rank_0s_counts_and_the_log_says_where_others_differ(tmp_path: Path, run_processes):
    (told, extra), (silent, others) = run_processes(of_ranks, str(tmp_path / "saved"))
    assert extra == others == {"rank": 0}
    assert told[0].startswith("save_state(extra=...) has other values on other ranks than on rank 0")
    assert not silent
