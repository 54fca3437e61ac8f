"""DeepSpeed's engine around layers of Transformer Engine; needs accel-deepspeed and DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_problem import accelerator, by_hand, model, train, weights
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

deepspeed = pytest.importorskip("accel_deepspeed")
pytestmark = pytest.mark.needs("accel-deepspeed")
pytest.importorskip("deepspeed")

RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}


def trained(stage: int) -> list[Any]:
    """(ours, by hand) of each recipe; each rank sees the whole batch, so one process is the judge."""
    pairs = []
    for recipe, kind in RECIPES.items():
        run = accelerator("deepspeed", deepspeed.DeepSpeedPlugin(zero_stage=stage), recipe=recipe)
        losses, net, _ = train(run)
        ours = losses, weights(run, net)
        pairs.append((ours, by_hand(kind())))
        run.end_training()
    return pairs


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [2, 3])
def test_losses_and_weights_are_those_of_the_loop_by_hand(stage: int, run_processes) -> None:
    first = model().state_dict()
    for pairs in run_processes(trained, stage, world=2, timeout=250):
        for (losses, after), (expected, by_library) in pairs:
            assert losses == expected
            assert [name for name in by_library if not torch.equal(after[name], by_library[name])] == []
            assert [name for name in by_library if torch.equal(after[name], first[name])] == []
