"""The options that set the sizes of a stack, and the plugins that have the dimensions, as their cards say."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from accel_core import discover
from accel_testing.decoder import SPLIT

__all__ = ["DIMS", "brought_in", "claims", "options"]

DIMS: Final = ("cp", "dp_replicate", "ep", "pp", "sp", "tp")
PLANS: Final = {
    "tensor-parallel": {"tensor_parallel.parallelize_plan": json.dumps(SPLIT)},
    "cp": {"cp.buffers": json.dumps({"input_ids": 1, "targets": 1})},
}
"""Extension -> the decoder's layers to split, the entries of its batches with a sequence."""


def claims(name: str) -> Collection[str]:
    """Return the dimensions that a plugin's card declares."""
    record = discover().get(name)
    return record.card.dimensions.keys() if record and record.card else ()


def brought_in(kind: str, dims: Collection[str]) -> dict[str, str]:
    """Return extension -> its dimension, for the dimensions that the strategy does not have itself."""
    own = claims(kind.partition(" ")[0])
    owners = {dim: name for name in PLANS for dim in claims(name)}
    return {owners[dim]: dim for dim in sorted(dims) if dim in owners and dim not in own}


def options(kind: str, dims: Collection[str], world: int) -> dict[str, str]:
    """Return dotted options that give each of `dims` the size 2."""
    strategy, _, number = kind.partition(" ")
    found = {f"parallelism.{dim}": "2" for dim in sorted(dims)}
    if strategy == "deepspeed":
        found["deepspeed.zero_stage"] = number
    rest = world // 2 ** len({*dims} - {"ep"})
    if strategy == "fsdp":
        found["fsdp.fsdp_version"] = number
        found["parallelism.dp_shard"] = str(rest)
    elif "dp_replicate" in dims:  # all ranks that the others leave
        found["parallelism.dp_replicate"] = str(2 * rest)
    for extension in brought_in(kind, dims):
        found |= PLANS[extension]
    return found
