"""Random training programs on two ranks give what plain PyTorch gives with both ranks' batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_core import Accelerator
from accel_deepspeed import DeepSpeedPlugin
from accel_testing.random_programs import Program, make_program, require_equal, train

SEEDS = range(8)


def program_of(seed: int) -> Program:
    """DeepSpeed steps in float32, by one optimizer, and keeps weights elsewhere."""
    return make_program(seed, dtype=torch.float32, splits=False, edits=False)


def trained(folder: str, stage: int) -> list[list[dict[str, Any]]]:
    found = []
    for seed in SEEDS:
        plugin = DeepSpeedPlugin(zero_stage=stage)
        accelerator = Accelerator(cpu=True, plugins=[plugin])
        found.append(train(program_of(seed), accelerator, f"{folder}/{seed}"))
        accelerator.end_training()
    return found


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 2, 3])
@pytest.mark.by_default("2")
def test_programs_train_as_plain_pytorch_does(tmp_path: Path, stage: int, run_processes) -> None:
    for found in run_processes(trained, str(tmp_path), stage):
        for seed, weights in zip(SEEDS, found, strict=True):
            require_equal(weights, program_of(seed), 2, atol=1e-5)
