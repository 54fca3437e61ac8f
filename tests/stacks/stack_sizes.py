"""How the sizes of a stack are set: the one place that knows under which options they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from accel_testing.decoder import SPLIT

__all__ = ["DIMS", "EXTENSIONS", "options"]

DIMS = ("dp_replicate", "tp", "pp", "cp", "ep", "sp")
"""The dimensions that a user can set; each is 2 in a drawn stack, and ranks that are left read other data."""
EXTENSIONS = {"tp": "tensor-parallel", "cp": "cp"}
"""Dimension -> the extension that serves it, where the strategy does not."""
OWN = {
    "megatron": {"tp": "megatron.tp_degree", "pp": "megatron.pp_degree"},
    "zero": {"sp": "deepspeed.hf_ds_config"},
}
"""Strategy -> the dimensions that it serves by options of its own, instead of the usual ones."""
USUAL = {
    "dp_replicate": "fsdp.dp_replicate_size",
    "tp": "tensor_parallel.tp_size",
    "pp": "fsdp.pp_size",
    "cp": "cp.size",
    "ep": "fsdp.ep_size",
    "sp": "deepspeed.hf_ds_config",
}


def options(strategy: str, dims: Iterable[str], world: int) -> Mapping[str, str]:
    """Return dotted options -> texts, for these dimensions of size 2."""
    family = strategy.partition(" ")[0]
    own, dims = OWN.get(family, {}), sorted(dims)
    found = {own.get(dim, USUAL[dim]): "2" for dim in dims}
    if "sp" in dims:
        found["deepspeed.hf_ds_config"] = json.dumps(
            {"sequence_parallel_size": 2, "zero_optimization": {"stage": int(strategy[-1]) if family == "zero" else 2}}
        )
    extensions = [EXTENSIONS[dim] for dim in dims if dim in EXTENSIONS and dim not in own]
    if "tensor-parallel" in extensions:
        found["tensor_parallel.parallelize_plan"] = json.dumps(SPLIT)
    if "cp" in extensions:
        found["cp.buffers"] = json.dumps({"input_ids": 1, "targets": 1})
    if family == "fsdp":
        # Here `ep` is a factor of the world. A stack means it as a part of dp_shard.
        found["fsdp.dp_shard_size"] = str(world // 2 ** len(dims))
    return found | ({"extensions": ",".join(extensions)} if extensions else {})
