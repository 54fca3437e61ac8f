"""Checkpoints: scales and histories as tensors, weights for any precision and number of processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from te_problem import TIMEOUT, accelerator, batches, model, steps_of, weights
from torch import nn
from transformer_engine.common.recipe import DelayedScaling

from accel_core import Accelerator, CheckpointError
from accel_transformer_engine.scaling import begin_anew, collect, restore


def prepared(strategy: str | None = None, **options: Any) -> tuple[Accelerator, Any, Any]:
    run = accelerator(strategy, recipe="delayed", amax_history_len=4, **options)
    net = model()
    net, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return run, net, optimizer


def goes_on(strategy: str | None, source: Path | None, target: Path) -> Any:
    """Resume from `source`, train two steps, save to `target`: weights loaded, losses, weights saved."""
    run, net, optimizer = prepared(strategy)
    if source is not None:
        run.load_state(source)
    before = weights(run, net)
    losses = steps_of(run, net, optimizer, batches(2))
    run.save_state(target)
    after = weights(run, net)
    run.end_training()
    return before, losses, after


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


def test_delayed_scaling_resumes_bit_for_bit_without_the_unsafe_variable(tmp_path: Path) -> None:
    assert "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE" not in os.environ
    run, net, optimizer = prepared()
    steps_of(run, net, optimizer, batches(2))
    run.save_state(tmp_path)
    losses = steps_of(run, net, optimizer, batches(3))
    expected = weights(run, net)
    run.end_training()
    for in_use in (False, True):  # layers that have not computed yet, and others
        run, net, optimizer = prepared()
        if in_use:
            steps_of(run, net, optimizer, batches(1))
        run.load_state(tmp_path)
        assert (net.block.up.fp8_meta["scaling_fwd"].scale[:2] != 1).all()
        assert steps_of(run, net, optimizer, batches(3)) == losses
        assert_equal(weights(run, net), expected)
        run.end_training()


def test_bf16_takes_over_from_float8_and_float8_from_bf16(tmp_path: Path) -> None:
    _, _, saved = goes_on(None, None, tmp_path / "a")
    assert_equal(in_bf16(tmp_path / "a", tmp_path / "b"), saved)
    loaded, _, _ = goes_on(None, tmp_path / "b", tmp_path / "c")
    assert_equal(loaded, saved)


@pytest.mark.needs("accel-ddp", "accel-fsdp")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process_two_and_one_again(tmp_path: Path, strategy: str, run_processes) -> None:
    _, _, saved = goes_on(None, None, tmp_path / "a")
    parts = run_processes(goes_on, strategy, tmp_path / "a", tmp_path / "b", world=2, timeout=200)
    for loaded, _, _ in parts:
        assert_equal(loaded, saved)
    again, _, _ = goes_on(None, tmp_path / "b", tmp_path / "c")
    assert_equal(again, parts[0][2])


def after_an_evaluation(strategy: str, folder: Path, evaluates: list[int], options: dict[str, Any]) -> Any:
    """What two steps after an evaluation give, and two steps of a run that resumes there.

    Ranks have other data, and rank 1 evaluates on the largest numbers.
    """
    found = []
    for resumes in (False, True):
        run = accelerator(strategy, recipe="delayed", in_evaluation=True, **options)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
        net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        rank = run.process_index
        data = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(rank))
        for number, x in enumerate(data):
            if number == 2 and resumes:
                run.load_state(folder)
            elif number == 2:
                with torch.no_grad():
                    if rank in evaluates:
                        net.eval()(data[0] * (2 + 9 * rank))
                net.train()
                run.save_state(folder)
            if number >= 2 or not resumes:
                run.backward(net(x).float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
        state = {name: each.value for name, each in collect(run.run.units[0], is_reduced=False).items()}
        found.append((state, weights(run, net)))
        run.end_training()
    return found


CASES: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "ddp": ("ddp", [0, 1], {"amax_history_len": 4}),
    "one rank alone, and long histories": ("ddp", [1], {"amax_history_len": 4096}),
    "fsdp": ("fsdp", [0, 1], {"amax_history_len": 4}),
    "not reduced": ("ddp", [0, 1], {"amax_history_len": 4, "reduce_amax": False}),
}


@pytest.mark.needs("accel-ddp", "accel-fsdp")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_maxima_of_an_evaluation_are_reduced_by_the_run_that_resumes(
    tmp_path: Path, case: str, run_processes
) -> None:
    strategy, evaluates, options = CASES[case]
    args = (strategy, tmp_path / "state", evaluates, options)
    of_ranks = run_processes(after_an_evaluation, *args, world=2, timeout=200)
    for (expected, expected_weights), (state, trained) in of_ranks:
        assert_equal(state, expected)
        assert_equal(trained, expected_weights)
    largest = [expected["0"][1:, 0].max() for (expected, _), _ in of_ranks]
    assert largest[1] > 30  # of rank 1's evaluation
    assert (largest[0] == largest[1]) == options.get("reduce_amax", True)


def test_a_checkpoint_without_scales_has_a_run_begin_anew_with_them(tmp_path: Path) -> None:
    run, net, optimizer = prepared()
    run.save_state(tmp_path)
    losses = steps_of(run, net, optimizer, batches(3))
    expected = weights(run, net)
    run.load_state(tmp_path)
    assert steps_of(run, net, optimizer, batches(3)) == losses
    assert_equal(weights(run, net), expected)
    run.end_training()


def test_scales_of_another_strategys_layers_begin_anew_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, net, optimizer = prepared()
    steps_of(run, net, optimizer, batches(1))
    (unit,), recipe = run.run.units, DelayedScaling(amax_history_len=4)
    theirs = {f"decoder.{name}": entry for name, entry in collect(unit).items()}
    begin_anew(unit)
    fresh = collect(unit)
    restore(unit, theirs, recipe)
    assert all(torch.equal(entry.value, fresh[name].value) for name, entry in collect(unit).items())
    assert "the checkpoint has scales of other layers (decoder." in caplog.text
    some = {name.removeprefix("decoder."): entry for name, entry in theirs.items()}
    with pytest.raises(CheckpointError, match="which is not converted here"):
        restore(unit, {**some, **theirs}, recipe)
    run.end_training()


def test_other_layers_or_histories_are_refused(tmp_path: Path) -> None:
    goes_on(None, None, tmp_path)
    run, *_ = prepared(skip="first")
    with pytest.raises(CheckpointError, match="has scales of first, which is not converted here"):
        run.load_state(tmp_path)
    run.end_training()
    run = accelerator(recipe="current", skip="first")  # it needs no scales
    net = model()
    run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    run.load_state(tmp_path)
    run.end_training()
    run = accelerator(recipe="delayed", amax_history_len=8)
    net = model()
    run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    with pytest.raises(CheckpointError, match=r"histories have 4 steps, those here 8\n.*amax_history_len: 4"):
        run.load_state(tmp_path)
    run.end_training()
