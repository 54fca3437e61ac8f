"""Which checkpoint is loaded: found, seen alike by all ranks, and verified, before any state is touched."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core.checkpoint.agree import agree
from accel_core.checkpoint.commit import carry_back, holders, locate
from accel_core.checkpoint.files import UnreadableError
from accel_core.checkpoint.read import Checkpoint
from accel_core.checkpoint.retention import number_in
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.retention import CheckpointSeries
    from accel_core.contract.run import Run

__all__ = ["find"]

logger = logging.getLogger(__name__)


def find(
    run: Run, series: CheckpointSeries, directory: str | os.PathLike[str] | None, *, missing_ok: bool
) -> Checkpoint | None:
    """The checkpoint to load, all of it verified: `directory`, or the newest of the numbered. Collective.

    None, with `missing_ok`, where there is none. What is damaged among the numbered is logged.

    Raises:
        CheckpointError: there is none, it is damaged, or ranks see different ones. On all ranks.
    """
    control = run.collectives("control")
    first = run.world.first_of_disk(each_node=run.config.project.save_on_each_node)
    around = series.folder.parent if directory is None else Path(os.path.realpath(directory))
    agree(control, lambda: carry_back(around) if first else None)
    if directory is not None:
        folder = _located(run, around)
        if missing_ok and not any(control.all_gather_object(folder.exists())):
            return None
        return _verified(run, folder)
    numbered = series.folder
    names = control.all_gather_object(agree(control, lambda: series.candidates() if first else []))
    found = sorted({name for each in names for name in each}, key=number_in, reverse=True)
    for name in found:
        try:
            return _verified(run, numbered / name)
        except UnreadableError:
            raise
        except CheckpointError as error:
            if control.rank == 0:
                logger.warning("passed over: %s", error)
    if missing_ok and not found:
        return None
    raise CheckpointError(
        f"none of the {len(found)} checkpoints in {numbered} can be loaded, the log says why\n"
        "restore one of them, or load another: accelerator.load_state('path/of/the/checkpoint')"
        if found
        else f"there is no checkpoint in {numbered}\nto start without one, load_state(missing_ok=True)",
        path=str(numbered),
    )


def _located(run: Run, target: Path) -> Path:
    """Where the checkpoint `target` is. Nodes with disks of their own take a save that all of them have."""
    if not run.config.project.save_on_each_node:
        return locate(target)
    control = run.collectives("control")
    here = agree(control, lambda: holders(target))
    everywhere = [set(each) for each in control.all_gather_object(list(here))]
    common = set.intersection(*everywhere)
    order = control.broadcast_object([*reversed(here)])
    return next((here[each] for each in order if each in common), target)


def _verified(run: Run, folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, once all ranks have seen the same one, and that all of it is whole."""
    control, world = run.collectives("control"), run.world
    checkpoint = agree(control, lambda: Checkpoint.open(folder))
    ids = set(control.all_gather_object(checkpoint.manifest.save_id))
    if len(ids) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints in {folder}: saves {', '.join(sorted(ids))}\n"
            "give all ranks the same directory, on a disk that all nodes share",
            path=str(folder),
        )
    each_node = run.config.project.save_on_each_node
    share, shares = (world.local_rank, world.local_size) if each_node else (world.rank, world.size)
    agree(control, lambda: checkpoint.verify(share, shares))
    return checkpoint
