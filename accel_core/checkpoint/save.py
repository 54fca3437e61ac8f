"""Saving: every rank writes its share beside the target, all agree, and the target appears at once."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
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
from accel_core.checkpoint.plan import Box, Declared, Key, plan, refuse
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
    if _differs_from_first(control, state):
        state.own["optimizers"] = state.optimizers
    for name, optimizers in state.optimizers.items():
        state.shared["units"][name]["optimizers"] = optimizers

    first = control.rank == 0
    save_id: str = control.broadcast_object(new_save_id(run.run_id) if first else None)
    agree(control, lambda: begin(target, save_id) if first else None)
    try:
        folder = partial_folder(target, save_id)
        mine = agree(control, lambda: _write_share(folder, control.rank, state, writes))
        records = {name: record for each in control.all_gather_object(mine) for name, record in each.items()}
        agree(
            control, lambda: write_manifest(folder, _manifest(run, save_id, step, records)) if first else None
        )
    except BaseException:  # a full disk, another rank's failure, Ctrl-C: nothing half-written stays
        if first:
            discard(target, save_id)
        raise
    agree(control, lambda: publish(target, save_id) if first else None)
    return target


def _plan(control: Collectives, state: Collected) -> list[dict[Key, list[Box]]]:
    everyone: list[tuple[dict[Key, Declared], list[Key]]] = [
        *control.all_gather_object((state.declared, state.absent))
    ]
    offered = {key for declared, _ in everyone for key in declared}
    missing = sorted({key for _, absent in everyone for key in absent} - offered)
    refuse(
        [f"{unit}: {key}: no rank offers it" for unit, key in missing],
        "the state of this run cannot be saved",
        "the plugin that describes this state must be fixed",
    )
    return plan([declared for declared, _ in everyone])


def _differs_from_first(control: Collectives, state: Collected) -> bool:
    """Whether this rank describes its optimizers otherwise than rank 0 does (pipelines: other layers)."""
    mine = state.optimizers_digest
    return bool(control.broadcast_object(mine) != mine)


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
    return Manifest(
        save_id=save_id,
        run_id=run.run_id,
        step=step,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world={"size": run.world.size, "nodes": run.world.nodes, "readers": run.topology.readers},
        stack={
            "summary": str(run.stack),
            "plugins": {
                chosen.name: {
                    "slot": chosen.record.slot,
                    "distribution": chosen.record.origin,
                    "why": chosen.why,
                }
                for chosen in run.stack.members()
            },
            "units": {unit.name: unit.strategy for unit in run.units},
            "device": run.device.type,
        },
        versions={
            "accel-core": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        config=json.loads(json.dumps(run.resolved.tree, default=repr)),  # for people
        random={
            "exact_at": {"size": run.world.size, "readers": run.topology.readers},
            "elsewhere": "derived",
        },
        files=dict(sorted(files.items())),
    )
