"""Random training programs on two ranks give what plain PyTorch gives with both ranks' batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import accelerator

from accel_testing.random_programs import Program, make_program, require_equal, train

SEEDS = range(8)


def program_of(seed: int) -> Program:
    """megatron-core steps in float32, by one optimizer."""
    return make_program(seed, dtype=torch.float32, splits=False, edits=False)


def trained(folder: str, overlaps: bool) -> list[list[dict[str, Any]]]:
    found = []
    for seed in SEEDS:
        ours = accelerator(other_megatron_args={"overlap_grad_reduce": overlaps})
        found.append(train(program_of(seed), ours, f"{folder}/{seed}"))
        ours.end_training()
    return found


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.by_default
def test_programs_train_as_plain_pytorch_does(tmp_path: Path, overlaps: bool, run_processes) -> None:
    for found in run_processes(trained, str(tmp_path), overlaps):
        for seed, weights in zip(SEEDS, found, strict=True):
            require_equal(weights, program_of(seed), 2, atol=1e-5)
