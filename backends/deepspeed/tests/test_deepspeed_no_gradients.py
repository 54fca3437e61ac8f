"""A step after no backward: nothing in plain PyTorch, and an error here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_problem import accelerator
from torch import nn

from accel_core import AccelError
from accel_deepspeed import DeepSpeedPlugin

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def stepped(config: dict[str, Any], clips: bool) -> list[Any]:
    """Return what a step says before any backward and after a step, and if it moved a tiny model."""
    ours = accelerator(DeepSpeedPlugin(hf_ds_config=config))
    model: Any = nn.Linear(2, 1, bias=False)  # one rank holds nothing but padding
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def weights() -> torch.Tensor:
        return torch.cat([weight.clone().flatten() for _, weight in ours.iter_weights(model)])

    said: list[Any] = []
    for _ in range(2):
        before = weights()
        try:
            if clips:
                ours.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        except AccelError as error:
            said.append(str(error))
        said.append(torch.equal(weights(), before))
        ours.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        said.append(torch.equal(weights(), before))
    ours.end_training()
    return said


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    **{f"zero{stage} offloaded": {"zero_optimization": {"stage": stage, **OFFLOADED}} for stage in (1, 2, 3)},
    **{f"zero{stage} bf16": {"zero_optimization": {"stage": stage}, **BF16} for stage in (0, 1)},
    "zero1 bf16, summed in fp32": {
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        **BF16,
    },
}


@pytest.mark.parametrize("clips", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_a_step_after_no_backward_is_an_error_and_moves_nothing(
    config: dict[str, Any], clips: bool, run_processes
) -> None:
    for first, is_still, moves_not, later, is_still_again, moves_not_again in run_processes(
        stepped, config, clips, world=2, timeout=200
    ):
        for said in (first, later):
            assert said.startswith("DeepSpeed: no gradient since the last optimizer.step()")
        assert is_still
        assert is_still_again
        assert not moves_not
        assert not moves_not_again


def dropped(stage: int) -> list[float]:
    """Return weights after a step whose window came after a backward that was cleared."""
    ours = accelerator(DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": stage, **OFFLOADED}}))
    model: Any = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours.backward(model(torch.full((1, 2), 8.0)).sum())
    optimizer.zero_grad()
    ours.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    return [float(each) for _, weight in ours.iter_weights(model) for each in weight.flatten()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_gradients_that_were_cleared_are_not_added_to(stage: int, run_processes) -> None:
    for weights in run_processes(dropped, stage, world=2, timeout=200):
        assert weights == pytest.approx([0.9, 0.9])
