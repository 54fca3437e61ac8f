"""Level 3: parameters that strategies are apt to forget, on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_testing.kit import tasks_awkward as tasks
from accel_testing.kit.checks import concerns
from accel_testing.kit.plugin import Kit
from accel_testing.kit.refused import accepted

pytestmark = concerns("device", "precision", "strategy", "extension")

Run = Callable[..., list[Any]]


def test_awkward_parameters_train_as_over_global_batches(run: Run, kit: Kit, world: int) -> None:
    kit.require_own_network()
    found, without = accepted(run, tasks.trained, world=world)
    (plain,) = run(tasks.by_hand, 0.0, without)
    tasks.assert_trained(found, plain.parameters)


def test_ranks_that_use_different_parameters_are_right_or_refused(run: Run, kit: Kit, world: int) -> None:
    kit.require_loops(run, world)
    found = run(tasks.parts_by_rank, world=world)
    said = [each for each, _ in found if isinstance(each, str)]
    if said:
        named = all(any(word in each for word in ("heads.", "experts.")) for each in said)
        assert named, f"no parameter is named: {said[0]}"
        return
    for ours, plain in found:
        assert ours.keys() == plain.keys()
        tasks.assert_trained([ours], plain)
