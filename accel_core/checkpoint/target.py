"""The target of a save, agreed by all ranks: its id, name and folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import finalize

from attrs import frozen

from accel_core.checkpoint import commit
from accel_core.checkpoint.agree import gather_from_all_ranks
from accel_core.checkpoint.writer import end_writing, is_over, new_save_id

if TYPE_CHECKING:
    from accel_core.checkpoint.disks import Disks
    from accel_core.checkpoint.files import FileRecord
    from accel_core.checkpoint.retention import CheckpointSeries
    from accel_core.contract.world import Collectives


@frozen
class SaveTarget:
    """The place of one save. The first rank of each disk makes and removes folders.

    path: the checkpoint. number: of the save in its series; numbered: the path has it in its name.
    over: the saves beside it that are written no more. seen: the id of the save that the path held before.
    """

    series: CheckpointSeries
    path: Path
    save_id: str
    number: int
    numbered: bool
    disks: Disks
    over: Collection[str]
    seen: str | None

    @classmethod
    def choose(
        cls,
        series: CheckpointSeries,
        control: Collectives,
        directory: str | os.PathLike[str] | None,
        disks: Disks,
        size: int,
    ) -> SaveTarget:
        """Return the next save's target: `directory`, or the next numbered one.

        Collective.

        What killed saves left there is removed, and the folder to write into is made. size: bytes that this
        rank will write.

        Raises:
            CheckpointError: the path is there and is not a checkpoint, or a folder cannot be made.
        """
        numbered = directory is None
        parent = Path(str(series.folder)) if directory is None else Path(os.path.realpath(directory)).parent

        def left() -> set[str]:
            return commit.leftover_ids(parent) if disks.is_first else set()

        save_id, over = judge_leftovers(series, control, left)

        def clear() -> tuple[int, int]:
            if not disks.is_first:
                return 0, size
            # A save that was named on one disk only is loaded from under its other name on the next.
            commit.remove_leftovers(parent, over, keep_complete=disks.are_several)
            return (series.free_number() if numbered else series.next_number), size

        chosen = gather_from_all_ranks(control, "save_state: choose a number", clear)
        number = max(free for free, _ in chosen)
        needed = sum(chosen[rank][1] for rank in disks.ranks_of(control.rank))
        path = Path(os.path.realpath(parent / f"checkpoint_{number}" if directory is None else directory))

        def begin() -> str | None:
            return commit.begin(path, save_id, needed) if disks.is_first else None

        try:
            seen = gather_from_all_ranks(control, "save_state: make a folder", begin)[control.rank]
            series.number_from(number + 1)
            target = cls(series, path, save_id, number, numbered, disks, over, seen)
            finalize(target, end_writing, save_id).atexit = False  # of one that Ctrl-C keeps from the caller
        except BaseException:  # of another rank, perhaps
            end_writing(save_id)
            raise
        return target

    @property
    def folder(self) -> Path:
        """The folder that the save is written into."""
        return commit.partial_folder(self.path, self.save_id)

    def write(self, write: Callable[[Path], dict[str, FileRecord]], size: int) -> dict[str, FileRecord]:
        """Let a rank write its files; name -> record."""
        del size
        return write(self.folder)

    def written(self, name: str, size: int) -> int:
        """Return how many bytes of a file are written, of `size` in all."""
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:  # the folder has the target's name by now
            return size

    # -- by the first rank of each disk, not collective --------------------------------------------

    def publish(self) -> None:
        """Give the complete folder its name."""
        ranks = self.disks.ranks_of(self.disks.rank)
        commit.publish(self.path, self.save_id, seen=self.seen, replace=not self.numbered, ranks=ranks)
        if self.numbered:
            self.series.published(self.number, self.save_id)

    def remove_replaced(self) -> None:
        """Remove what the new checkpoint replaces, once it has its name on all disks."""
        for old in commit.replaced(self.path, self.save_id):
            commit.discard(old, self.path)
        if self.numbered:
            self.series.retain(self.save_id)
        commit.remove_leftovers(self.path.parent, self.over, keep_complete=False)

    def discard(self) -> None:
        """Leave nothing half-written. Never raises, since a save has failed."""
        commit.discard(self.folder, self.path)
        self.end_writing()

    def end_writing(self) -> None:
        """Do nothing more for this save. By any rank, any number of times."""
        end_writing(self.save_id)


def judge_leftovers(
    series: CheckpointSeries, control: Collectives, left_here: Callable[[], set[str]]
) -> tuple[str, set[str]]:
    """Return the new save's id and the ids of finished ones beside it. Collective."""

    def look() -> tuple[str, set[str]]:
        return new_save_id(series.run.run_id) if control.rank == 0 else "", left_here()

    looked = gather_from_all_ranks(control, "save_state: look for leftovers", look)
    save_id, left = looked[0][0], set().union(*(ids for _, ids in looked))
    if not left:
        return save_id, left

    def judge() -> set[str]:
        return {each for each in left if is_over(each)}

    # A process of another node may have made what lies on this disk: each rank knows its own machine.
    judged = gather_from_all_ranks(control, "save_state: judge leftovers", judge)
    return save_id, set().union(*judged)
