"""With bfloat16 weights, clipping measures and bounds what this step applies, in every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_core.testing import run_processes
from accel_deepspeed import DeepSpeedPlugin

pytestmark = pytest.mark.timeout(300)


def clipped_steps(stage: int) -> list[tuple[float, float]]:
    """(norm before clipping, how far the weights moved) of two steps of SGD, clipped to 0.5."""
    accelerator = Accelerator(
        device="cpu", mixed_precision="bf16", plugins=[DeepSpeedPlugin(zero_stage=stage)]
    )
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs, found = torch.linspace(-2, 2, 32).reshape(4, 8).to(torch.bfloat16), []
    for _ in range(2):
        before = {name: weight.clone() for name, weight in accelerator.iter_weights(model, torch.float32)}
        accelerator.backward((model(inputs).float() - 3).square().sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        after = dict(accelerator.iter_weights(model, torch.float32))
        moved = torch.stack([(after[name] - before[name]).square().sum() for name in before]).sum().sqrt()
        found.append((float(norm), float(moved)))
    accelerator.end_training()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_moves_the_weights_by_the_norm_it_is_clipped_to(stage: int) -> None:
    for steps in run_processes(clipped_steps, stage, world=2, timeout=200):
        for norm, moved in steps:
            assert norm > 5
            assert moved == pytest.approx(0.5, rel=0.02)
