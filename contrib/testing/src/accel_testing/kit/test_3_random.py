"""Level 3: ranks draw alike if their activations are alike, and else apart."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from accel_testing.kit.checks import concerns
from accel_testing.kit.plugin import Kit
from accel_testing.kit.tasks_random import drawn

pytestmark = concerns("device", "strategy", "extension")

Run = Callable[..., list[Any]]


def test_layers_draw_alike_where_activations_are_alike(run: Run, kit: Kit, world: int) -> None:
    kit.require_own_network()
    ranks = run(drawn, world=world)
    assert any(numbers for _, numbers in ranks), "no layer of the model was run"
    for (place, mine), (other, others) in combinations(ranks, 2):
        if place == other:
            assert mine == others, f"two ranks at {place} have the same activations, and draw other numbers"
        else:
            assert not {*mine} & {*others}, f"the ranks at {place} and {other} draw the same numbers"
