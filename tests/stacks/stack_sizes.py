"""Under which options the sizes of a stack are set, and which plugins have them. No other file here knows."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from accel_testing.decoder import SPLIT

__all__ = ["CLAIMS", "DIMS", "brought_in", "options"]

DIMS: Final = ("cp", "dp_replicate", "ep", "pp", "sp", "tp")
CLAIMS: Final = {
    "dp_replicate": ("fsdp",),
    "ep": ("fsdp",),
    "pp": ("fsdp", "megatron"),
    "sp": ("deepspeed",),
    "tp": ("megatron",),
}
"""Dimension -> the strategies that have it themselves."""
EXTENSIONS: Final = {"tp": "tensor-parallel", "cp": "cp"}
"""Dimension -> the extension that has it under all other strategies."""
OPTIONS: Final = {
    "cp": "cp.size",
    "dp_replicate": "fsdp.dp_replicate_size",
    "ep": "fsdp.ep_size",
    "pp": "fsdp.pp_size",
    "sp": "deepspeed.hf_ds_config",
    "tp": "tensor_parallel.tp_size",
}
OF_MEGATRON: Final = {"pp": "megatron.pp_degree", "tp": "megatron.tp_degree"}
PLANS: Final = {
    "tensor-parallel": {"tensor_parallel.parallelize_plan": json.dumps(SPLIT)},
    "cp": {"cp.buffers": json.dumps({"input_ids": 1, "targets": 1})},
}
"""Extension -> the decoder's layers to split, the entries of its batches with a sequence."""


def brought_in(kind: str, dims: Collection[str]) -> dict[str, str]:
    """Return extension -> its dimension, for the dimensions that the strategy does not have itself."""
    strategy = kind.partition(" ")[0]
    return {
        EXTENSIONS[dim]: dim
        for dim in sorted(dims)
        if dim in EXTENSIONS and strategy not in CLAIMS.get(dim, ())
    }


def options(kind: str, dims: Collection[str], world: int) -> dict[str, str]:
    """Return dotted options that give each of `dims` the size 2."""
    strategy, _, number = kind.partition(" ")
    names = OPTIONS | (OF_MEGATRON if strategy == "megatron" else {})
    found = {names[dim]: "2" for dim in sorted(dims)}
    if "sp" in dims:
        zero = {"stage": int(number) if strategy == "deepspeed" else 2}
        found[OPTIONS["sp"]] = json.dumps({"sequence_parallel_size": 2, "zero_optimization": zero})
    elif strategy == "deepspeed":
        found["deepspeed.zero_stage"] = number
    if strategy == "fsdp":
        found["fsdp.fsdp_version"] = number
        found["fsdp.dp_shard_size"] = str(world // 2 ** len(dims))  # `ep` is a factor of the world
    for extension in brought_in(kind, dims):
        found |= PLANS[extension]
    return found
