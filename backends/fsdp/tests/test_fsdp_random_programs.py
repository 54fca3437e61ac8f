"""Random training programs on two ranks give what plain PyTorch gives with both ranks' batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_core import Accelerator
from accel_fsdp import FullyShardedDataParallelPlugin
from accel_testing import run_processes
from accel_testing.random_programs import make_program, require_equal, train

SEEDS = range(20)


def trained(folder: str, version: int) -> list[list[dict[str, Any]]]:
    found = []
    for seed in SEEDS:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        accelerator = Accelerator(cpu=True, plugins=[plugin])
        found.append(train(make_program(seed, edits=version == 2), accelerator, f"{folder}/{seed}"))
        accelerator.end_training()
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_programs_train_as_plain_pytorch_does(tmp_path: Path, version: int) -> None:
    for found in run_processes(trained, str(tmp_path), version):
        for seed, weights in zip(SEEDS, found, strict=True):
            require_equal(weights, make_program(seed, edits=version == 2), 2, atol=1e-12)
