"""What each rank of test_storage_strided does: DTensors of which a rank holds several boxes."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from accel_core.storage import load, save
from accel_core.storage.leaves import leaf_of

LAYOUTS = {
    "packed rows": ((2,), [_StridedShard(0, split_factor=2)]),
    "packed columns": ((2,), [_StridedShard(1, split_factor=2)]),
    "three in one": ((2,), [_StridedShard(0, split_factor=3)]),
    "uneven": ((2,), [_StridedShard(0, split_factor=5)]),
    "rows, then packed columns": ((2, 1), [Shard(0), _StridedShard(1, split_factor=2)]),
    "rows that two dimensions split": ((2, 1), [_StridedShard(0, split_factor=1), Shard(0)]),
}


def numbered(rows: int = 12, columns: int = 8) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


def spread(whole, sizes, placements) -> DTensor:
    """Cut a tensor as torch deals out strided shards: in turns."""
    mesh, local = init_device_mesh("cpu", sizes), whole
    for at, ranks, placement in zip(mesh.get_coordinate(), sizes, placements, strict=True):
        parts = local.chunk(ranks * getattr(placement, "split_factor", 1), placement.dim)
        local = torch.cat(parts[at::ranks], placement.dim)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def boxes(name):
    """Say of each box of this rank if it has the elements of its place; and count elements and boxes."""
    whole = numbered()
    leaf = leaf_of(spread(whole, *LAYOUTS[name]))
    right = [
        torch.equal(
            part, whole[tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))]
        )
        for offset, part in leaf.shards
    ]
    return right, sum(part.numel() for _, part in leaf.shards)


def saved(folder, name):
    save({"weight": spread(numbered(), *LAYOUTS[name])}, checkpoint_id=folder)


def loaded(folder, name):
    """Load the tensor in another layout, and return what this rank's part lacks."""
    state = {"weight": spread(torch.zeros_like(numbered()), *LAYOUTS[name])}
    load(state, checkpoint_id=folder)
    return (state["weight"].to_local() - spread(numbered(), *LAYOUTS[name]).to_local()).abs().sum().item()
