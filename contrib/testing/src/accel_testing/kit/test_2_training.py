"""Level 2: training equals the plain PyTorch loop, number by number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accel_testing.kit import tasks_awkward, tasks_delegating, tasks_items, tasks_units
from accel_testing.kit import tasks_training as tasks
from accel_testing.kit.checks import concerns, quick, requires
from accel_testing.kit.compare import assert_near, assert_same_training
from accel_testing.kit.plugin import Kit
from accel_testing.kit.refused import accepted
from accel_testing.kit.stack import TestedStack
from accel_testing.kit.tasks_training import Recipe

pytestmark = concerns("device", "precision", "strategy", "extension")

Run = Callable[..., list[Any]]
LOW = [pytest.param(name, marks=requires(name)) for name in ("bf16", "fp16")]


@pytest.fixture
def together(run: Run, kit: Kit) -> int:
    """Return the number of processes over which one model is spread, else one."""
    return max([world for world in kit.worlds if kit.count_readers(run, world) == 1], default=1)


@pytest.fixture
def run(run: Run, together: int) -> Run:
    """In that many processes; each of them has the numbers of the one plain loop."""
    return partial(run, world=together)


@pytest.fixture
def loops(run: Run, kit: Kit, together: int) -> None:
    """For checks of loops with a forward and a backward of their own."""
    kit.require_loops(run, together)


def check(run: Run, *, low_precision: bool = False, **recipe: Any) -> tasks.Trace:
    found: list[tuple[tasks.Trace, tasks.Trace]] = run(tasks.ours, Recipe(**recipe))
    for ours, plain in found:
        assert_same_training(ours, plain, low_precision=low_precision)
    return found[0][0]


def computes_with_copies(stack: TestedStack) -> bool:
    """Tell if the strategy rounds copies of the weights, more than autocast does."""
    return "whole_weights" not in stack.offers


def test_units_are_described_line_by_line(run: Run) -> None:
    for lines in run(tasks.described):
        assert all(type(line) is str and line and "\n" not in line for line in lines), lines


def test_a_module_that_was_not_prepared_unwraps_to_itself(run: Run) -> None:
    for found in run(tasks.unwrapped_strangers):
        others = {name: other for name, other in found.items() if other}
        assert not others, f"unwrap_model must return the very module of what it did not wrap: {others}"


def test_a_hook_that_only_calls_the_layer_below_changes_nothing(
    run: Run, stack: TestedStack, tmp_path: Path
) -> None:
    plugins = [(record.card.implementation, record.slot) for record in stack.records if record.card]
    classes = [(path, slot) for path, slot in plugins if path is not None and slot in tasks_delegating.LAYERS]
    for found in run(tasks_delegating.trained, classes, str(tmp_path)):
        usual = found[tasks_delegating.NOBODY]
        if isinstance(usual, str):
            pytest.skip(f"this training fails with the stack's own hooks: {usual}")
        errors = {hook: error for hook, error in found.items() if isinstance(error, str)}
        assert not errors, f"self.below.HOOK(...) of these hooks fails: {errors}"
        others = [hook for hook, weights in found.items() if weights != usual]
        assert not others, f"hooks that only call self.below train otherwise: {', '.join(others)}"


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=quick), 4])
def test_losses_equal_the_plain_loop(run: Run, accumulation: int) -> None:
    check(run, accumulation=accumulation)


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=quick)])
def test_clipping_by_norm(run: Run, accumulation: int) -> None:
    ours = check(run, clip_norm=0.1, accumulation=accumulation)
    assert min(ours.norms) > 0.1, "the recipe must clip to show anything"


def test_clipping_by_value(run: Run) -> None:
    check(run, clip_value=0.01)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_schedulers_step_with_the_optimizer(run: Run, accumulation: int) -> None:
    ours = check(run, schedule=True, accumulation=accumulation)
    assert ours.rates == sorted(ours.rates, reverse=True)


@requires("several_optimizers")
def test_two_optimizers_of_one_model(run: Run) -> None:
    check(run, optimizers=2, schedule=True, accumulation=2, clip_norm=0.1)


@pytest.mark.parametrize("calls", ["late", "late_optimizer"])
def test_objects_prepared_in_several_calls(run: Run, calls: str) -> None:
    check(run, calls=calls, schedule=True)


@pytest.mark.parametrize("precision", LOW)
def test_mixed_precision(run: Run, stack: TestedStack, precision: str) -> None:
    low = computes_with_copies(stack)
    check(run, low_precision=low, precision=precision, accumulation=2, clip_norm=0.1, init_scale=1024.0)


@pytest.mark.parametrize("precision", LOW)
def test_forward_runs_in_the_precision(run: Run, kit: Kit, precision: str) -> None:
    kit.require_own_network()
    dtype = f"torch.{'bfloat16' if precision == 'bf16' else 'float16'}"
    for found in run(tasks.forward_dtypes, precision):
        assert found == {"computed in": {dtype}, "parameters": "torch.float32", "left": False}


@requires("fp16")
def test_float16_parameters_are_refused_by_name(run: Run) -> None:
    for said, weight, units in run(tasks_items.float16_refusal):
        assert weight in said, said
        assert "model.float()" in said.splitlines()[-1], said
        assert units == 0


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.usefixtures("loops")
def test_sums_are_divided_by_the_items_of_the_window(
    run: Run, stack: TestedStack, accumulation: int, clip_norm: float | None
) -> None:
    low = "mixed_precision" in stack.arguments  # sums, scaled otherwise, round otherwise
    for ours, plain in run(tasks_items.ragged, accumulation, clip_norm):
        assert_near("norms", ours.norms, plain.norms, low_precision=low)
        assert_near("weights", ours.weights, plain.weights, low_precision=low)


@requires("fp16")
@pytest.mark.parametrize(
    "optimizers", [pytest.param(1, marks=quick), pytest.param(2, marks=requires("several_optimizers"))]
)
def test_overflowing_steps_are_skipped(run: Run, stack: TestedStack, optimizers: int) -> None:
    recipe: dict[str, Any] = {"precision": "fp16", "init_scale": 2.0**24, "schedule": True}
    low = computes_with_copies(stack)
    ours = check(run, low_precision=low, optimizers=optimizers, clip_norm=0.5, **recipe)
    assert ours.skipped[0], "the recipe must overflow to show anything"
    assert not ours.skipped[-1]


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.usefixtures("loops")
def test_two_units_keep_windows_of_their_own(run: Run, accumulation: int) -> None:
    for ours, plain in run(tasks_units.gan, accumulation):
        assert_same_training(ours, plain)


@pytest.mark.usefixtures("loops")
def test_a_student_learns_from_a_teacher(run: Run) -> None:
    for ours, plain in run(tasks_units.distillation):
        assert_same_training(ours, plain)


def test_forward_backward_equals_the_loop(run: Run) -> None:
    for ours, plain in run(tasks.whole_windows, Recipe(accumulation=2)):
        assert_same_training(ours, plain)


def test_recomputed_activations_give_the_same_gradients(run: Run, kit: Kit, together: int) -> None:
    kit.require_own_schedule(run, together)
    kept, again = run(tasks.recomputed, False), run(tasks.recomputed, True)
    for (ours, forwards), (plain, _) in zip(again, kept, strict=True):
        assert forwards > len(ours.losses), "checkpoint_function has to compute a forward again in backward"
        assert (ours.losses, ours.weights) == (plain.losses, plain.weights)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("by_hand", [False, True], ids=["accelerator.backward", "loss.backward"])
def test_a_loop_of_ones_own_is_right_or_refused(run: Run, kit: Kit, accumulation: int, by_hand: bool) -> None:
    kit.require_own_network()
    for said, ours, plain in run(tasks.own_loop, accumulation, by_hand):
        if not said:
            assert_near("weights", ours, plain)


@pytest.mark.usefixtures("loops")
def test_an_accumulated_step_is_left_alone_mid_window(run: Run) -> None:
    for found in run(tasks.mid_window):
        assert found == {
            "weights changed": False,
            "gradients kept": True,
            "clipped": False,
            "rate changed": False,
        }


def test_awkward_parameters_train_as_in_the_plain_loop(run: Run, kit: Kit, together: int) -> None:
    kit.require_own_network()
    found, without = accepted(run, tasks_awkward.trained, world=together)
    plain = run(tasks_awkward.by_hand, 0.0, without)[0]
    tasks_awkward.assert_trained(found, plain.parameters)
