"""Find and verify the checkpoint to load, before any state is touched."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core.checkpoint.agree import gather_from_all_ranks, run_on_all_ranks
from accel_core.checkpoint.commit import carry_back
from accel_core.checkpoint.disks import locate_on_all_disks
from accel_core.checkpoint.manifest import is_there
from accel_core.checkpoint.read import Checkpoint
from accel_core.checkpoint.retention import number_in
from accel_core.checkpoint.stored import Place, UnreadableError, place
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.retention import CheckpointSeries
    from accel_core.contract.run import Run

__all__ = ["find"]

logger = logging.getLogger(__name__)


def find(
    run: Run,
    series: CheckpointSeries,
    directory: str | os.PathLike[str] | Place | None,
    *,
    missing_ok: bool,
    best: bool = False,
) -> Checkpoint | None:
    """Open and verify `directory`, or the newest or best numbered checkpoint.

    Collective.

    None, with `missing_ok`, where there is none. What is damaged among the numbered is logged.

    Raises:
        CheckpointError: there is none, it is damaged, or ranks see different ones. On all ranks.
    """
    control = run.collectives("control")
    first = run.world.first_of_disk(each_node=run.config.project.save_on_each_node)
    around = series.folder.parent if directory is None else _real(place(directory))

    def carry() -> None:
        if first and isinstance(around, Path):
            carry_back(around)

    run_on_all_ranks(control, "load_state: carry back", carry)
    if directory is not None:
        folder = locate_on_all_disks(run, around)
        there = [True]
        if missing_ok:
            there = gather_from_all_ranks(control, "load_state: look", lambda: is_there(folder))
        return _verified(run, folder) if any(there) else None
    candidates = series.best_candidates if best else series.candidates
    listed = gather_from_all_ranks(control, "load_state: list", lambda: candidates() if first else [])
    names = list(dict.fromkeys(name for of_disk in listed for name in of_disk))
    if not best:
        names.sort(key=number_in, reverse=True)
    for name in names:
        try:
            return _verified(run, series.folder / name)
        except UnreadableError:
            raise
        except CheckpointError as error:
            if control.rank == 0:
                logger.warning("passed over: %s", error)
    unmeasured = (
        best
        and not names
        and any(
            gather_from_all_ranks(control, "load_state: look", lambda: first and bool(series.candidates()))
        )
    )
    if missing_ok and not names and not unmeasured:
        return None
    of_metric = f" with a value of {run.config.project.keep_best!r}" if best else ""
    start = (
        "to take the newest, load_state()"
        if unmeasured
        else "to start without one, load_state(missing_ok=True)"
    )
    raise CheckpointError(
        f"none of the {len(names)} checkpoints in {series.folder} can be loaded, the log says why\n"
        "restore one of them, or load another: accelerator.load_state('path/of/the/checkpoint')"
        if names
        else f"there is no checkpoint{of_metric} in {series.folder}\n{start}",
        path=str(series.folder),
    )


def _real(where: Place) -> Place:
    return Path(os.path.realpath(where)) if isinstance(where, Path) else where


def _verified(run: Run, folder: Place) -> Checkpoint:
    """Open the checkpoint in `folder`, the same on all ranks, every block verified."""
    control, world = run.collectives("control"), run.world
    checkpoint = run_on_all_ranks(control, "load_state: open", lambda: Checkpoint.open(folder))
    save_id = checkpoint.manifest.save_id
    seen = set(gather_from_all_ranks(control, "load_state: compare", lambda: save_id))
    if len(seen) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints in {folder}: saves {', '.join(sorted(seen))}\n"
            "give all ranks the same directory, on a disk that all nodes share",
            path=str(folder),
        )
    each_node = run.config.project.save_on_each_node
    share, shares = (world.local_rank, world.local_size) if each_node else (world.rank, world.size)
    run_on_all_ranks(control, "load_state: verify", lambda: checkpoint.verify(share, shares))
    return checkpoint
