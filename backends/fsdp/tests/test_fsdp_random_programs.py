"""Random training programs on several ranks give what plain PyTorch gives with all ranks' batches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_core import Accelerator, ParallelismConfig, TorchDynamoPlugin
from accel_fsdp import FullyShardedDataParallelPlugin, TorchTensorParallelPlugin
from accel_testing.random_programs import Program, make_program, require_equal, train

SEEDS = range(12)
SPLIT = TorchTensorParallelPlugin(tp_size=2, parallelize_plan={"first": "colwise", "second": "rowwise"})


def options(**given: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(**given)


FULL = [pytest.mark.full]
STACKS: dict[str, tuple[int, int, Sequence[Any]]] = {
    "version 1": (2, 2, [options(fsdp_version=1)]),
    "version 1, blocks kept gathered": (
        2,
        2,
        [options(fsdp_version=1, min_num_params=10, sharding_strategy="SHARD_GRAD_OP")],
    ),
    "version 1, compiled": (
        2,
        2,
        [options(fsdp_version=1, min_num_params=10), TorchDynamoPlugin(backend="aot_eager")],
    ),
    "version 2": (2, 2, [options()]),
    "version 2, blocks checkpointed": (2, 2, [options(min_num_params=10, activation_checkpointing=True)]),
    "replicas": (4, 4, [options(min_num_params=10), ParallelismConfig(dp_replicate=2)]),
    "split": (2, 1, [options(), ParallelismConfig(dp_shard=1), SPLIT]),
    "split and sharded": (4, 2, [options(), SPLIT]),
}
"""Ranks, those that read different batches, plugins."""


def program_of(seed: int, stack: str) -> Program:
    return make_program(seed, edits="version 1" not in stack)


def trained(folder: str, stack: str) -> list[list[dict[str, Any]]]:
    # dynamo reads it of gathered weights
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    found = []
    for seed in SEEDS:
        accelerator = Accelerator(cpu=True, plugins=[*STACKS[stack][2]])
        found.append(train(program_of(seed, stack), accelerator, f"{folder}/{seed}"))
        accelerator.end_training()
    return found


@pytest.mark.parametrize(
    "stack",
    [pytest.param(stack, marks=[] if "version" in stack and "," not in stack else FULL) for stack in STACKS],
)
@pytest.mark.by_default("version 2")
def test_programs_train_as_plain_pytorch_does(tmp_path: Path, stack: str, run_processes) -> None:
    ranks, readers, _ = STACKS[stack]
    for found in run_processes(trained, str(tmp_path), stack, world=ranks):
        for seed, weights in zip(SEEDS, found, strict=True):
            require_equal(weights, program_of(seed, stack), readers, atol=1e-12)
