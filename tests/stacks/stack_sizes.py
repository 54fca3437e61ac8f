"""Under which options the sizes of a stack are set. No other file of these tests knows."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from accel_testing.decoder import SPLIT

__all__ = ["DIMS", "EXTENSIONS", "OPTIONS", "options"]

DIMS: Final = ("cp", "dp_replicate", "ep", "pp", "sp", "tp")
EXTENSIONS: Final = {"tp": "tensor-parallel", "cp": "cp"}
"""Dimension -> the extension that has it, under strategies that have none of this name."""
OPTIONS: Final = {
    "cp": "cp.size",
    "dp_replicate": "fsdp.dp_replicate_size",
    "ep": "fsdp.ep_size",
    "pp": "fsdp.pp_size",
    "sp": "deepspeed.hf_ds_config",
    "tp": "tensor_parallel.tp_size",
}
OWN: Final = {"megatron": {"tp": "megatron.tp_degree", "pp": "megatron.pp_degree"}}
"""Strategy -> the dimensions that have other options under it."""
PLANS: Final = {
    "tensor-parallel": {"tensor_parallel.parallelize_plan": json.dumps(SPLIT)},
    "cp": {"cp.buffers": json.dumps({"input_ids": 1, "targets": 1})},
}
"""Extension -> the decoder's layers to split, the entries of its batches with a sequence."""


def options(kind: str, dims: Collection[str], world: int) -> tuple[list[str], dict[str, str]]:
    """Return the extensions to name, and dotted options that give each of `dims` the size 2."""
    strategy, _, number = kind.partition(" ")
    own = OWN.get(strategy, {})
    extensions = [EXTENSIONS[dim] for dim in sorted(dims) if dim in EXTENSIONS and dim not in own]
    found = {(OPTIONS | own)[dim]: "2" for dim in sorted(dims)}
    if "sp" in dims:
        zero = {"stage": int(number) if strategy == "deepspeed" else 2}
        found[OPTIONS["sp"]] = json.dumps({"sequence_parallel_size": 2, "zero_optimization": zero})
    elif strategy == "deepspeed":
        found["deepspeed.zero_stage"] = number
    if strategy == "fsdp":
        found["fsdp.fsdp_version"] = number
        found["fsdp.dp_shard_size"] = str(world // 2 ** len(dims))
    for extension in extensions:
        found |= PLANS[extension]
    return extensions, found
