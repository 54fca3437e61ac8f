"""The target of a save in a store, agreed by all ranks.

Each rank sends its own files, and rank 0 does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import finalize

from attrs import define

from accel_core.checkpoint import stored_commit
from accel_core.checkpoint.agree import gather_from_all_ranks
from accel_core.checkpoint.bound import may_be_done_yet
from accel_core.checkpoint.stored import StoredPath
from accel_core.checkpoint.target import judge_leftovers
from accel_core.checkpoint.votes import work_together
from accel_core.checkpoint.writer import begin_writing, end_writing, keep_writing

if TYPE_CHECKING:
    from accel_core.checkpoint.disks import Disks
    from accel_core.checkpoint.files import FileRecord
    from accel_core.checkpoint.retention import CheckpointSeries
    from accel_core.contract.world import Collectives


@define(eq=False)
class StoredTarget:
    """The place of one save in a store, with what `SaveTarget` has.

    commit: the number of its manifest.
    """

    series: CheckpointSeries
    path: StoredPath
    save_id: str
    number: int
    numbered: bool
    disks: Disks
    commit: int

    @classmethod
    def choose(
        cls, series: CheckpointSeries, control: Collectives, directory: StoredPath | None, disks: Disks
    ) -> StoredTarget:
        """Return the next save's target: `directory`, or the next numbered one.

        Collective. What killed saves left there is removed.

        Raises:
            CheckpointError: the store proves no commits, or cannot be written; or something else is there.
        """
        folder = series.folder if directory is None else directory
        assert isinstance(folder, StoredPath)
        around: list[StoredPath] = []

        def look() -> set[str]:
            if disks.is_first:
                found = series.uncounted() if directory is None else [folder]
                around.extend(path for path in found if isinstance(path, StoredPath))
            return set().union(*map(stored_commit.unfinished, around))

        together = work_together(series.run, "save_state", alone=control.size == 1)
        save_id, over = judge_leftovers(series, control, together(look))
        if disks.is_first:
            begin_writing(save_id)

        def begin() -> tuple[int, int]:
            if not disks.is_first:
                return 0, 0
            stored_commit.remove_unfinished(around, over)
            number = series.next_number if directory is not None else series.free_number()
            return number, stored_commit.begin(directory or folder / f"checkpoint_{number}", save_id)

        try:
            begun = gather_from_all_ranks(control, "save_state: begin in the store", together(begin))
            number, commit = begun[0]
            series.number_from(number + 1)
            path = directory or folder / f"checkpoint_{number}"
            target = cls(series, path, save_id, number, directory is None, disks, commit)
            finalize(target, end_writing, save_id).atexit = False  # of one that Ctrl-C keeps from the caller
        except BaseException:  # of another rank, perhaps
            end_writing(save_id)
            raise
        return target

    @property
    def folder(self) -> StoredPath:
        """The folder of this save's files."""
        return self.path / self.save_id

    def write(self, write: Callable[[Path], dict[str, FileRecord]], size: int) -> dict[str, FileRecord]:
        """Let a rank write its files here, and send them; name -> record."""
        with stored_commit.spool(size) as beside:
            records = write(beside)
            stored_commit.send(beside, records, self.folder)
        return records

    def written(self, name: str, size: int) -> int:
        """Return 0: how much of a file is sent is not known before all of it is."""
        del name, size
        return 0

    # -- by rank 0 ---------------------------------------------------------------------------------

    def publish(self) -> None:
        """Commit."""
        stored_commit.publish(self.path, self.save_id, self.commit)
        if self.numbered:
            self.series.published(self.number, self.save_id)

    def remove_replaced(self) -> None:
        """Remove what the new checkpoint replaces."""
        stored_commit.remove_older(self.path, self.commit)
        if self.numbered:
            self.series.retain(self.save_id)

    def discard(self) -> None:
        """Leave nothing half-written. Never raises, since a save has failed."""
        stored_commit.discard(self.path, self.save_id)
        self.end_writing()

    def end_writing(self) -> None:
        """Do nothing more for this save. By any rank, any number of times."""
        if may_be_done_yet():  # its manifest, too, which must find the files
            keep_writing(self.save_id)
        end_writing(self.save_id)
