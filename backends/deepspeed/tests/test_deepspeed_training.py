"""Training under every ZeRO stage is training in plain PyTorch, number by number."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_problem import Recipe, accelerator, native, train

from accel_core.testing import run_processes
from accel_deepspeed import DeepSpeedPlugin

STAGES = [0, 1, 2, 3]
pytestmark = pytest.mark.timeout(300)


def near(ours: list[float], plain: list[float], relative: float = 1e-6) -> None:
    assert ours == pytest.approx(plain, rel=relative, abs=1e-6)


def trained(stage: int, recipe: Recipe, options: dict[str, Any]) -> list[float]:
    plugin = DeepSpeedPlugin(zero_stage=stage, **options)
    ours = accelerator(plugin, gradient_accumulation_steps=recipe.accumulation)
    found = train(ours, recipe)
    ours.end_training()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_the_trajectory_is_that_of_plain_pytorch(stage: int, world: int) -> None:
    recipe = Recipe(accumulation=2, clip=0.1, schedule=True)
    for found in run_processes(trained, stage, recipe, {}, world=world):
        near(found, native(recipe, world))


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_clipped_unasked(stage: int) -> None:
    recipe = Recipe()
    (found,) = run_processes(trained, stage, recipe, {}, world=1)
    near(found, native(recipe, 1))
