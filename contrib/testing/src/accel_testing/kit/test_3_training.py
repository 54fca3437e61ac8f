"""Level 3: several processes train one model as one process would."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from accel_testing.kit import tasks_items
from accel_testing.kit import tasks_parallel as tasks
from accel_testing.kit.checks import concerns, quick, requires
from accel_testing.kit.compare import assert_near
from accel_testing.kit.plugin import Kit
from accel_testing.kit.stack import TestedStack, variables
from accel_testing.kit.tasks_training import Recipe

pytestmark = concerns("device", "precision", "strategy", "extension")

Run = Callable[..., list[Any]]
GLOBAL_BATCH = 8


@pytest.fixture
def loops(run: Run, kit: Kit, world: int) -> None:
    """For checks of loops with a forward and a backward of their own."""
    kit.require_loops(run, world)


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=quick)])
def test_the_global_batch_decides_not_who_computes_it(
    run: Run, stack: TestedStack, world: int, readers: int, accumulation: int
) -> None:
    _check_invariance(run, stack, world, readers, accumulation=accumulation)


def test_clipping_sees_the_gradient_of_all(run: Run, stack: TestedStack, world: int, readers: int) -> None:
    _check_invariance(run, stack, world, readers, accumulation=2, clip_norm=0.1)


def test_schedulers_count_steps_not_processes(run: Run, world: int) -> None:
    recipe = Recipe(batches=8 * world, batch_size=2, accumulation=2, epochs=1, schedule=True)
    for each in run(tasks.invariance, recipe, world=world):
        assert each.rates == pytest.approx([0.1 / (1 + step) for step in range(1, len(each.rates) + 1)])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.usefixtures("loops")
def test_the_items_of_all_decide_not_who_has_them(
    run: Run, stack: TestedStack, world: int, accumulation: int
) -> None:
    low = "mixed_precision" in stack.arguments
    for ours, plain in run(tasks_items.ragged, accumulation, 0.1, world=world):
        assert_near("norms", ours.norms, plain.norms, low_precision=low)
        assert_near("weights", ours.weights, plain.weights, low_precision=low)


def _check_invariance(
    run: Run, stack: TestedStack, world: int, readers: int, accumulation: int, **recipe: Any
) -> None:
    steps = 24
    share = GLOBAL_BATCH // readers // accumulation
    batches = steps * GLOBAL_BATCH // share
    mine = Recipe(batches=batches, batch_size=share, accumulation=accumulation, epochs=1, **recipe)
    by_rank = run(tasks.invariance, mine, world=world)
    shared = variables(stack.settings_without("strategy", "extension"))
    # The same parts of each global batch, in one window: a precision that scales by batch sees the same ones.
    alike = Recipe(batches=batches, batch_size=share, accumulation=readers * accumulation, epochs=1, **recipe)
    (alone,) = run(tasks.by_hand, alike, shared)
    micro = [sum(values) / world for values in zip(*(each.losses for each in by_rank), strict=True)]
    low = "mixed_precision" in stack.arguments
    assert_near("losses", _by_step(micro, steps), _by_step(alone.losses, steps), low_precision=low)
    assert_near("norms", by_rank[0].norms, alone.norms, low_precision=low)
    assert_near("weights", by_rank[0].weights, alone.weights, low_precision=low)


def _by_step(losses: list[float], steps: int) -> list[float]:
    """Return the mean of each step; some strategies give one loss per window."""
    size = len(losses) // steps
    return [sum(losses[at : at + size]) / size for at in range(0, len(losses), size)]


@quick
@requires("whole_weights")
def test_replicas_begin_and_stay_equal(run: Run, world: int) -> None:
    found = run(tasks.replicas, world=world)
    assert all(each == found[0] for each in found), "ranks hold different weights"


@requires("whole_weights")
def test_each_rank_holds_whole_weights(run: Run, stack: TestedStack, world: int) -> None:
    low = "mixed_precision" in stack.arguments  # a backend may hold them in 16 bits
    for held, expected in run(tasks.whole, world=world):
        assert_near("weights", held, expected, low_precision=low)


@requires("no_sync", "whole_weights")
@pytest.mark.usefixtures("loops")
def test_a_window_communicates_once(run: Run, stack: TestedStack, world: int, readers: int) -> None:
    found = run(tasks.quiet_windows, world=world)
    if "local_gradients" in stack.offers:
        for each in found:  # one batch in all micro-batches, and no rate: so one gradient, but for ranks
            assert each["seen"][1] == each["seen"][0], "tensor hooks see reduced gradients"
    one, other = (pick(found, key=lambda each: each["reader"]) for pick in (min, max))
    for window in (0, 2):
        at_its_end = [each["gradients"][window + 1] for each in found]
        assert all(each == at_its_end[0] for each in at_its_end), "ranks apply different gradients"
        if readers > 1:
            apart = one["gradients"][window] != other["gradients"][window]
            assert apart, "gradients were communicated inside the window"
    if readers > 1:
        assert one["gradients"][4] != other["gradients"][4], "gradients were communicated in no_sync"
        _check_counts(one["reductions"])


def _check_counts(counts: list[int | None]) -> None:
    if None in counts:
        return  # no device that counts; the gradients have shown it
    steps = [after - before for before, after in pairwise(counts)]  # type: ignore[operator]
    inside, at_the_end, in_no_sync = steps[1], steps[2], steps[3]
    assert (inside, in_no_sync) == (0, 0), f"{inside} reductions inside a window, {in_no_sync} in no_sync"
    assert at_the_end >= 1


@requires("join", "whole_weights")
@pytest.mark.usefixtures("loops")
def test_ranks_may_run_out_of_batches(run: Run, world: int) -> None:
    found = run(tasks.uneven_inputs, world=world)
    assert all(each == found[0] for each in found), "ranks hold different weights"


def test_runs_follow_one_another_in_a_process(run: Run, world: int) -> None:
    for _, second, third in run(tasks.sequential_runs, world=world):
        assert_near("losses", third, second)


def test_two_runs_live_in_one_process(run: Run, world: int) -> None:
    for found in run(tasks.simultaneous_runs, world=world):
        assert_near("losses beside another run", found["two"], found["two, alone"])
        assert_near("losses after another run", found["two, after one has ended"], found["two, alone"])


@requires("local_sgd", "whole_weights")
@pytest.mark.usefixtures("loops")
def test_local_sgd_trains_apart_and_averages(run: Run, world: int, readers: int) -> None:
    found = run(tasks.apart, world=world)
    assert [each["before"] for each in found] == [float(each["reader"]) for each in found]
    one, other = (pick(found, key=lambda each: each["reader"]) for pick in (min, max))
    assert readers == 1 or one["stepped"] != other["stepped"], "gradients were reduced inside LocalSGD"
    for each in found:
        assert_near("averaged weights", each["after"], [(readers - 1) / 2] * len(each["after"]))
