"""Checkpoints are those of bf16: either precision and any number of processes resumes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from float8_problem import TIMEOUT, accelerator, batches, model, steps_of, weights

from accel_core import Accelerator


def goes_on(strategy: str | None, gathers: bool, source: Path | None, target: Path) -> Any:
    """Resume from `source`, train two steps, save to `target`; the weights loaded and saved."""
    run = accelerator(strategy, all_gather=gathers)
    net = model()
    net, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    if source is not None:
        run.load_state(source)
    before = weights(run, net)
    steps_of(run, net, optimizer, batches(2))
    run.save_state(target)
    after = weights(run, net)
    run.end_training()
    return before, after


def in_bf16(source: Path, target: Path) -> Any:
    run = Accelerator(device="cpu", mixed_precision="bf16", plugins=[TIMEOUT])
    net = model()
    net, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    run.load_state(source)
    before = weights(run, net)
    run.save_state(target)
    run.end_training()
    return before


def assert_equal(first: Any, second: Any) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_bf16_takes_over_from_float8_and_float8_from_bf16(tmp_path: Path) -> None:
    _, saved = goes_on(None, False, None, tmp_path / "a")
    assert_equal(in_bf16(tmp_path / "a", tmp_path / "b"), saved)
    loaded, after = goes_on(None, False, tmp_path / "b", tmp_path / "c")
    assert_equal(loaded, saved)
    _, without_bf16 = goes_on(None, False, tmp_path / "a", tmp_path / "d")
    assert_equal(after, without_bf16)


@pytest.mark.needs("accel-fsdp")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.by_default
def test_one_process_two_and_one_again(tmp_path: Path, gathers: bool, run_processes) -> None:
    _, saved = goes_on(None, False, None, tmp_path / "a")
    parts = run_processes(goes_on, "fsdp", gathers, tmp_path / "a", tmp_path / "b", world=2, timeout=200)
    for loaded, _ in parts:
        assert_equal(loaded, saved)
    again, _ = goes_on(None, False, tmp_path / "b", tmp_path / "c")
    assert_equal(again, parts[0][1])
