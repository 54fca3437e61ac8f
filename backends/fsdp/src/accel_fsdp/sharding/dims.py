"""Mesh dimensions of a run, and the dimensions that weights are sharded over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh

from accel_core import MeshDim

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core import Mesh, World
    from accel_fsdp.config import FullyShardedDataParallelPlugin

__all__ = ["declared", "replica_groups", "replica_names", "sharding", "shards", "stages"]


def declared(config: FullyShardedDataParallelPlugin, sizes: Mapping[str, int], world: World) -> list[MeshDim]:
    """Return the dimensions that fsdp divides ranks along, with the sizes of section `parallelism`.

    A HYBRID strategy without sizes shards within a node.
    """
    replicate, shard = sizes.get("dp_replicate"), sizes.get("dp_shard")
    is_open = -1 in [size for name, size in sizes.items() if name != "ep"]
    if config.strategy.startswith("HYBRID") and replicate is None and not is_open:
        others = math.prod(size for name, size in sizes.items() if name not in ("dp_shard", "ep"))
        replicate, shard = -1, max(1, world.local_size // others) if shard is None else shard
    elif shard is None:
        shard = 1 if is_open else -1
    found = [
        MeshDim("dp_replicate", 1 if replicate is None else replicate),
        MeshDim("dp_shard", shard),
    ]
    if sizes.get("pp", 1) != 1:
        found.append(MeshDim("pp", sizes["pp"]))
    if sizes.get("ep", 1) != 1:
        found.append(MeshDim("ep", sizes["ep"], within="dp_shard"))
    return found


def sharding(mesh: Mesh, *left: str) -> DeviceMesh:
    """Return the ranks that share a model's weights.

    One dimension, or one to replicate over before it. Collective.

    Whatever splits samples or tokens has gradients to reduce, so weights may be sharded over it too; but
    over none of the dimensions `left`.
    """
    names = _sharding_names(mesh, *left) or ("dp_shard",)
    shard: DeviceMesh = mesh.device_mesh[names]
    if len(names) > 1:
        shard = shard._flatten("+".join(names))
    if mesh.size("dp_replicate") == 1:
        return shard
    if not hasattr(DeviceMesh, "_concatenate"):  # torch 2.9 and earlier
        (name,) = shard.mesh_dim_names or ()
        sliced: DeviceMesh = mesh.device_mesh["dp_replicate", name]
        return sliced
    both: DeviceMesh = DeviceMesh._concatenate([mesh.device_mesh["dp_replicate"], shard])
    return both


def shards(mesh: Mesh | None) -> int:
    """Return the number of ranks that a weight is sharded over, experts aside."""
    return 1 if mesh is None else math.prod(map(mesh.size, _sharding_names(mesh)))


def _sharding_names(mesh: Mesh, *left: str) -> tuple[str, ...]:
    names = [name for name in mesh.names("samples", "tokens") if name not in ("dp_replicate", *left)]
    return tuple(name for name in names if mesh.size(name) > 1)


def replica_names(mesh: Mesh) -> list[str]:
    """Return the dimensions whose ranks compute the same layers on the same data.

    They are all that split the model but stages.
    """
    return [name for name in mesh.names("model") if name != "pp" and mesh.size(name) > 1]


def replica_groups(mesh: Mesh) -> list[ProcessGroup]:
    """Return the groups of ranks along these dimensions."""
    return [mesh.device_mesh.get_group(name) for name in replica_names(mesh)]


def stages(mesh: Mesh | None) -> ProcessGroup | None:
    """Return the ranks that hold the other stages of this rank's part of a pipeline."""
    if mesh is None or mesh.size("pp") == 1:
        return None
    group: ProcessGroup = mesh.device_mesh.get_group("pp")
    return group
