"""Saving: every rank writes its share beside the target, all agree, and the target appears at once."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict
from torch import Tensor

from accel_core import __version__
from accel_core.checkpoint.agree import agree
from accel_core.checkpoint.codec import name_of
from accel_core.checkpoint.collect import Collected, collect
from accel_core.checkpoint.files import FileRecord, sync_folder, write_data, write_json, write_manifest
from accel_core.checkpoint.place import Place
from accel_core.checkpoint.plan import Box, Key, plan
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.run import Run

__all__ = ["save"]

Records = dict[str, FileRecord]


def save(run: Run, directory: str | os.PathLike[str] | None, *, step: int | None = None) -> Path:
    """Save all state of the run as the checkpoint `directory`. Collective: all ranks, one directory.

    Until it is complete, a checkpoint that was there before stays; a kill at any instant leaves one
    of the two, whole. `step` is recorded as it is given. Without a directory it is the next of the
    numbered ones, and those over `total_limit` are removed once it is complete.

    Raises:
        CheckpointError: a unit is inside an accumulation window, something cannot be stored, the
            directory holds something else, or a rank failed to write. Raised on all ranks; what
            was there before is unchanged.
    """
    run.require_alive()
    control = run.collectives("control")
    if run.mark_step is not None:
        run.mark_step("state")
    state = agree(control, lambda: collect(run))
    writes = plan(control.all_gather_object(state.declared))[control.rank]
    place = Place.choose(run, directory)
    try:
        mine = agree(control, lambda: _write_share(place.folder, control.rank, state, writes))
        records = {name: record for each in control.all_gather_object(mine) for name, record in each.items()}
        manifest = {**place.members, "step": step, **_manifest(run, records)}
        agree(control, lambda: write_manifest(place.folder, manifest) if place.first else None)
        agree(control, lambda: place.publish() if place.first else None)
    except BaseException:  # a full disk, another rank's failure, Ctrl-C: nothing half-written stays
        if place.first:
            place.discard()
        raise
    return place.target


def _write_share(folder: Path, rank: int, state: Collected, writes: Mapping[Key, list[Box]]) -> Records:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}, made by rank 0, is not visible here\n"
            "give all ranks the same directory, on a disk that all nodes share"
        )
    data, index = f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"
    parts = [
        (key, box, tensor)
        for key, wanted in writes.items()
        for offset, tensor in state.leaves[key].shards
        if (box := Box(tuple(offset), tuple(tensor.shape))) in wanted
    ]
    parts.sort(key=lambda part: -part[2].dtype.itemsize)  # so each is aligned to its own item size
    record, blocks, starts = write_data(folder / data, [_named(state, *part) for part in parts])
    tensors: dict[str, dict[str, dict[str, Any]]] = {}
    for ((unit, key), box, tensor), start in zip(parts, starts, strict=True):
        leaf = state.leaves[unit, key]
        described = {"kind": leaf.kind, "shape": leaf.global_shape, "dtype": name_of(tensor.dtype)}
        layout = {} if leaf.layout is None else {"layout": leaf.layout}
        known = tensors.setdefault(unit, {}).setdefault(key, {**described, **layout, "boxes": []})
        known["boxes"].append([*box, start])
    content = {"rank": rank, "state": state.own, "blocks": blocks, "tensors": tensors}
    records = {data: record, index: write_json(folder / index, content)}
    if rank == 0:
        records["state.json"] = write_json(folder / "state.json", state.shared)
    sync_folder(folder)
    return records


def _named(state: Collected, key: Key, box: Box, tensor: Tensor) -> tuple[str, Tensor]:
    """A name for the safetensors header, which only other tools read: the key, and where a part starts."""
    part = "" if box.shape == state.leaves[key].global_shape else f"@{','.join(map(str, box.offset))}"
    return "/".join(filter(None, key)) + part, tensor


def _manifest(run: Run, files: Records) -> dict[str, Any]:
    exact_at = {"size": run.world.size, "readers": run.topology.readers}
    members = [(chosen.name, chosen.record, chosen.why) for chosen in run.stack.members()]
    versions = {"accel-core": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world": {**exact_at, "nodes": run.world.nodes},
        "mesh": {},
        "stack": {
            "summary": str(run.stack),
            "device": run.device.type,
            "units": {unit.name: unit.strategy for unit in run.units},
            "plugins": {name: {"distribution": record.origin, "why": why} for name, record, why in members},
        },
        "versions": versions,
        "config": run.resolved.tree,
        "random": {"exact_at": exact_at, "elsewhere": "derived"},
        "files": {name: asdict(record) for name, record in sorted(files.items())},
    }
