"""Find and verify the checkpoint to load, before any state is touched."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from attrs import evolve

from accel_core.checkpoint.agree import gather_from_all_ranks, run_on_all_ranks
from accel_core.checkpoint.commit import carry_back
from accel_core.checkpoint.disks import locate_on_all_disks
from accel_core.checkpoint.manifest import manifest_if_any
from accel_core.checkpoint.problems import MisfitError
from accel_core.checkpoint.read import Checkpoint
from accel_core.checkpoint.shared_answers import SharedAnswers
from accel_core.checkpoint.stored import Place, UnreadableError, place
from accel_core.checkpoint.stored_commit import is_save
from accel_core.checkpoint.votes import work_together
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.reader import Block
    from accel_core.checkpoint.retention import CheckpointSeries
    from accel_core.contract.run import Run

logger = logging.getLogger(__name__)

T = TypeVar("T")
Needed: TypeAlias = "Sequence[Callable[[Checkpoint], set[Block]]]"
Told: TypeAlias = "tuple[str, set[Block] | None, set[Block]]"
"""The folder of a rank, the blocks that it needs, and those that it has.

None for the needed ones if the checkpoint does not fit.
"""


def find(
    run: Run,
    series: CheckpointSeries,
    directory: str | os.PathLike[str] | Place | None,
    needed: Needed,
    *,
    missing_ok: bool,
    best: bool = False,
) -> Checkpoint | None:
    """Open and verify `directory`, or the newest or best numbered checkpoint.

    Collective.

    needed: return the blocks that this rank reads, one after the other; of a store, no others are.
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
            asks = isinstance(folder, Path) or control.rank == 0
            there = gather_from_all_ranks(
                control,
                "load_state: look",
                _together(run, [folder], lambda: asks and _holds_something(folder)),
            )
        return _verified(run, folder, needed) if any(there) else None
    candidates = series.best_candidates if best else series.candidates
    here = control.rank == 0  # one rank asks the store, so that all take the same
    together = partial(_together, run, [each.folder for each in series.places])
    listed = gather_from_all_ranks(
        control, "load_state: list", together(lambda: candidates(stored=here) if first else [])
    )
    found = list(dict.fromkeys(each for of_disk in listed for each in of_disk))
    if not best:
        found.sort(key=lambda each: (-each[0], each[1]))
    for each in found:
        try:
            return _verified(run, series.path_of(each), needed)
        except UnreadableError:
            raise
        except CheckpointError as error:
            if control.rank == 0:
                logger.warning("passed over: %s", error)
    unmeasured = False
    if best and not found:
        there = gather_from_all_ranks(
            control, "load_state: look", together(lambda: first and bool(series.candidates(stored=here)))
        )
        unmeasured = any(there)
    if missing_ok and not found and not unmeasured:
        return None
    raise _nothing_loaded(run, series, len(found), best=best, unmeasured=unmeasured)


def _holds_something(folder: Place) -> bool:
    """Return True if the folder is there.

    One in a store is there if it holds something else than saves that have not ended.
    """
    if isinstance(folder, Path):
        return folder.exists()
    return not all(map(is_save, folder.listed().entries))


def _together(run: Run, places: Sequence[Place], action: Callable[[], T]) -> Callable[[], T]:
    """Return an action that ranks do together, if a place is in a store."""
    is_local = all(isinstance(each, Path) for each in places)
    return action if is_local else work_together(run, "load_state")(action)


def _nothing_loaded(
    run: Run, series: CheckpointSeries, tried: int, *, best: bool, unmeasured: bool
) -> CheckpointError:
    of_metric = f" with a value of {run.config.project.keep_best!r}" if best else ""
    start = (
        "to take the newest, load_state()"
        if unmeasured
        else "to start without one, load_state(missing_ok=True)"
    )
    return CheckpointError(
        f"none of the {tried} checkpoints in {series.where} can be loaded, the log says why\n"
        "restore one of them, or load another: accelerator.load_state('path/of/the/checkpoint')"
        if tried
        else f"there is no checkpoint{of_metric} in {series.where}\n{start}",
        path=str(series.folder),
    )


def _real(where: Place) -> Place:
    return Path(os.path.realpath(where)) if isinstance(where, Path) else where


def _verified(run: Run, folder: Place, needed: Needed) -> Checkpoint:
    """Open the checkpoint in `folder`, the same on all ranks, verified."""
    control, world = run.collectives("control"), run.world
    checkpoint = _opened(run, folder)
    save_id = checkpoint.manifest.save_id
    seen = set(gather_from_all_ranks(control, "load_state: compare", lambda: save_id))
    if len(seen) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints in {folder}: saves {', '.join(sorted(seen))}\n"
            "give all ranks the same directory, on a disk that all nodes share",
            path=str(folder),
        )
    if not isinstance(folder, Path):
        try:
            _fetch(run, checkpoint, needed)
        except BaseException as error:
            checkpoint.node_copy.close()  # now, to have its room for another that is tried
            if isinstance(error, CheckpointError) and not isinstance(error, UnreadableError):
                look = work_together(run, "load_state")(partial(_require_same, checkpoint))
                run_on_all_ranks(control, "load_state: look again", look)
            raise
        return checkpoint
    each_node = run.config.project.save_on_each_node
    share, shares = (world.local_rank, world.local_size) if each_node else (world.rank, world.size)
    run_on_all_ranks(control, "load_state: verify", lambda: checkpoint.verify(share, shares))
    return checkpoint


def _opened(run: Run, folder: Place) -> Checkpoint:
    """Open the checkpoint in `folder` on all ranks. Rank 0 asks a store, for all."""
    control = run.collectives("control")
    if isinstance(folder, Path):
        return run_on_all_ranks(control, "load_state: open", lambda: Checkpoint.open(folder))
    shared, mine = SharedAnswers(folder.store), list[Checkpoint]()

    def first() -> None:
        if control.rank == 0:
            mine.append(Checkpoint.open(evolve(folder, store=shared)))

    run_on_all_ranks(control, "load_state: open", work_together(run, "load_state")(first))
    shared.answers = control.broadcast_object(shared.answers)

    def opened() -> Checkpoint:
        return mine[0] if mine else Checkpoint.open(evolve(folder, store=shared))

    checkpoint = run_on_all_ranks(control, "load_state: open", opened)
    shared.answers = None
    return checkpoint


def _require_same(checkpoint: Checkpoint) -> None:
    """Raise UnreadableError if another save has taken the checkpoint's place."""
    now, save_id = manifest_if_any(checkpoint.folder), checkpoint.manifest.save_id
    if now is not None and now.save_id != save_id:
        raise UnreadableError(
            f"{checkpoint.folder} was overwritten while it was read: its manifest is of save {now.save_id}"
            f" now, and was of {save_id}\nload it again, once nothing else saves there",
            path=str(checkpoint.folder),
        )


def _fetch(run: Run, checkpoint: Checkpoint, needed: Needed) -> None:
    """Bring the blocks that the ranks of a node need to its disk. Collective.

    Each comes once, verified. The rest of one that does not fit stays where it is.
    """
    control, copy, node = run.collectives("control"), checkpoint.node_copy, platform.node()
    made = gather_from_all_ranks(control, "load_state: begin", lambda: (node, str(copy.folder)))
    copy.share(Path(next(folder for name, folder in made if name == node)))

    plan = work_together(run, "load_state")(_needed_here)
    for blocks_of in needed:
        told = gather_from_all_ranks(control, "load_state: plan", partial(plan, checkpoint, blocks_of))
        if any(blocks is None for _, blocks, _ in told):
            return  # which is raised where it is compared
        if any(blocks for _, blocks, _ in told):
            _share_out(run, checkpoint, told)


def _needed_here(checkpoint: Checkpoint, blocks_of: Callable[[Checkpoint], set[Block]]) -> Told:
    try:
        blocks = blocks_of(checkpoint)
    except MisfitError:
        blocks = None
    except Exception:  # it may be damaged: if it is whole, the same is raised where it is compared
        blocks = {*checkpoint.blocks}
    return str(checkpoint.node_copy.folder), blocks, checkpoint.fetched


def _share_out(run: Run, checkpoint: Checkpoint, told: Sequence[Told]) -> None:
    """Let each rank of a node bring a part of what is left to bring. Collective."""
    control, folder = run.collectives("control"), told[run.world.rank][0]
    here = [rank for rank, (other, *_) in enumerate(told) if other == folder]
    wanted = {block for rank in here for block in told[rank][1] or ()}
    fetched = {block for rank in here for block in told[rank][2]}
    left, share = sorted(wanted - fetched), here.index(control.rank)
    # Asked before any rank writes: what is written is not needed twice.
    run_on_all_ranks(control, "load_state: room", lambda: checkpoint.require_room(left))
    fetch = work_together(run, "load_state")(checkpoint.verify)
    run_on_all_ranks(control, "load_state: verify", lambda: fetch(share, len(here), left))
    checkpoint.add_fetched(wanted | fetched)
