"""Saving: every rank writes its share beside the target, all agree, and the target appears at once."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_core import __version__
from accel_core.checkpoint.agree import agree
from accel_core.checkpoint.codec import name_of
from accel_core.checkpoint.collect import Collected, collect
from accel_core.checkpoint.commit import begin, discard, new_save_id, partial_folder, publish
from accel_core.checkpoint.files import FileRecord, sync_folder, write_data, write_json
from accel_core.checkpoint.manifest import Manifest, write_manifest
from accel_core.checkpoint.plan import Box, Declared, Key, plan
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.run import Run
    from accel_core.world import Collectives

__all__ = ["save"]

Records = dict[str, FileRecord]


def save(run: Run, directory: str | os.PathLike[str], *, step: int | None = None) -> Path:
    """Save all state of the run as the checkpoint `directory`. Collective: all ranks, one directory.

    Until it is complete, a checkpoint that was there before stays; a kill at any instant leaves one
    of the two, whole. `step` is recorded as it is given.

    Raises:
        CheckpointError: a unit is inside an accumulation window, something cannot be stored, the
            directory holds something else, or a rank failed to write. Raised on all ranks; what
            was there before is unchanged.
    """
    run.require_alive()
    target = Path(os.path.realpath(directory))
    control = run.collectives("control")
    if run.mark_step is not None:
        run.mark_step("state")
    state = agree(control, lambda: collect(run))
    writes = _plan(control, state)[control.rank]
    first = control.rank == 0
    save_id: str = control.broadcast_object(new_save_id(run.run_id) if first else None)
    agree(control, lambda: begin(target, save_id) if first else None)
    try:
        folder = partial_folder(target, save_id)
        mine = agree(control, lambda: _write_share(folder, control.rank, state, writes))
        records = {name: record for each in control.all_gather_object(mine) for name, record in each.items()}
        manifest = _manifest(run, save_id, step, records)
        agree(control, lambda: write_manifest(folder, manifest) if first else None)
    except BaseException:  # a full disk, another rank's failure, Ctrl-C: nothing half-written stays
        if first:
            discard(target, save_id)
        raise
    agree(control, lambda: publish(target, save_id) if first else None)
    return target


def _plan(control: Collectives, state: Collected) -> list[dict[Key, list[Box]]]:
    """For each rank, the boxes it writes; ranks tell each other what they have."""
    mine = (state.declared, state.absent, state.optimizers_digest)
    everyone: Sequence[tuple[dict[Key, Declared], list[Key], str]] = control.all_gather_object(mine)
    if state.optimizers_digest != everyone[0][2]:  # pipelines: other layers are optimized here
        state.own["optimizers"] = state.optimizers
    offered = {key for declared, _, _ in everyone for key in declared}
    missing = {key for _, absent, _ in everyone for key in absent} - offered
    return plan([declared for declared, _, _ in everyone], missing)


def _write_share(folder: Path, rank: int, state: Collected, writes: Mapping[Key, list[Box]]) -> Records:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}, made by rank 0, is not visible here\n"
            "give all ranks the same directory, on a disk that all nodes share"
        )
    name = f"rank-{rank:05d}"
    boxes = [(key, box, _tensor(state, key, box)) for key, wanted in writes.items() for box in wanted]
    named = _header_names(state, boxes)
    data, blocks, starts = write_data(folder / f"{name}.safetensors", named)
    index: dict[str, dict[str, Any]] = {}
    for (key, box, tensor), start in zip(boxes, starts, strict=True):
        leaf = state.leaves[key]
        described = index.setdefault(key[0], {}).setdefault(
            key[1],
            {"kind": leaf.kind, "shape": leaf.global_shape, "dtype": name_of(tensor.dtype), "boxes": []},
        )
        if leaf.layout is not None:
            described["layout"] = leaf.layout
        described["boxes"].append([box.offset, box.shape, start])
    content = {"rank": rank, "state": state.own, "blocks": blocks, "tensors": index}
    records = {f"{name}.safetensors": data, f"{name}.json": write_json(folder / f"{name}.json", content)}
    if rank == 0:
        for unit, optimizers in state.optimizers.items():
            state.shared["units"][unit]["optimizers"] = optimizers
        records["state.json"] = write_json(folder / "state.json", state.shared)
    sync_folder(folder)
    return records


def _tensor(state: Collected, key: Key, box: Box) -> Tensor:
    return next(
        tensor for offset, tensor in state.leaves[key].shards if (tuple(offset), tuple(tensor.shape)) == box
    )


def _header_names(state: Collected, boxes: list[tuple[Key, Box, Tensor]]) -> list[tuple[str, Tensor]]:
    """Names for the safetensors header, which only other tools read: the key, and where a part starts."""
    named: dict[str, Tensor] = {}
    for (unit, key), box, tensor in boxes:
        name = f"{unit}/{key}" if unit else key
        if box.shape != state.leaves[unit, key].global_shape:
            name += f"@{','.join(map(str, box.offset))}"
        while name in named or name == "__metadata__":
            name += "'"
        named[name] = tensor
    return [*named.items()]


def _manifest(run: Run, save_id: str, step: int | None, files: Records) -> Manifest:
    exact_at = {"size": run.world.size, "readers": run.topology.readers}
    members = [(chosen.name, chosen.record, chosen.why) for chosen in run.stack.members()]
    return Manifest(
        save_id=save_id,
        run_id=run.run_id,
        step=step,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world={**exact_at, "nodes": run.world.nodes},
        stack={
            "summary": str(run.stack),
            "device": run.device.type,
            "units": {unit.name: unit.strategy for unit in run.units},
            "plugins": {name: {"distribution": record.origin, "why": why} for name, record, why in members},
        },
        versions={"accel-core": __version__, "torch": torch.__version__, "python": platform.python_version()},
        config=json.loads(json.dumps(run.resolved.tree, default=repr)),
        random={"exact_at": exact_at, "elsewhere": "derived"},
        files=dict(sorted(files.items())),
    )
