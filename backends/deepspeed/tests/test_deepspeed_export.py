"""Whole weights: each rank holds them below stage 3, and rank 0 alone gets them in it."""

from __future__ import annotations

import pytest
import torch
from deepspeed_problem import accelerator, network, sgd

from accel_deepspeed import DeepSpeedPlugin


def answered(stage: int) -> tuple[int, bool, int]:
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage))
    model = network()
    model, _ = ours.prepare(model, sgd(model.parameters()))
    found, wanted = ours.get_state_dict(model), network().state_dict()
    same = all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    whole = ours.get_state_dict(model, rank0_only=False)
    return len(found), same, len(whole)


@pytest.mark.parametrize(("stage", "elsewhere"), [(2, 6), (3, 0)])
def test_rank_0_alone_gets_the_weights_of_stage_3(stage: int, elsewhere: int, run_processes) -> None:
    assert run_processes(answered, stage, timeout=120) == [(6, True, 6), (elsewhere, True, 6)]
