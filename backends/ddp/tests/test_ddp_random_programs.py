"""Random training programs on two ranks give what plain PyTorch gives with both ranks' batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_core import Accelerator, GradientAccumulationPlugin
from accel_testing.random_programs import make_program, require_equal, train

SEEDS = range(12)


def trained(folder: str, sync_each_batch: bool) -> list[list[dict[str, Any]]]:
    found = []
    for seed in SEEDS:
        plugin = GradientAccumulationPlugin(sync_each_batch=sync_each_batch)
        accelerator = Accelerator(cpu=True, strategy="ddp", gradient_accumulation_plugin=plugin)
        found.append(train(make_program(seed), accelerator, f"{folder}/{seed}"))
        accelerator.end_training()
    return found


@pytest.mark.parametrize("sync_each_batch", [False, True])
@pytest.mark.by_default
def test_programs_train_as_plain_pytorch_does(tmp_path: Path, sync_each_batch: bool, run_processes) -> None:
    for found in run_processes(trained, str(tmp_path), sync_each_batch):
        for seed, weights in zip(SEEDS, found, strict=True):
            require_equal(weights, make_program(seed), 2, atol=1e-12)
