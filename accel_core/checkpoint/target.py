"""Where a save goes, agreed by all ranks: its id, its name, the folder it is written into."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize

from attrs import frozen

from accel_core.checkpoint.agree import agree
from accel_core.checkpoint.commit import (
    begin,
    clean,
    discard,
    finish,
    is_over,
    leftovers,
    new_save_id,
    partial_folder,
    publish,
    replaced,
)

if TYPE_CHECKING:
    from accel_core.checkpoint.retention import CheckpointSeries
    from accel_core.contract.world import Collectives

__all__ = ["Place"]


@frozen
class Place:
    """One save's target. Some ranks make, name and remove folders, the others only write.

    rank: this one, among those that save. firsts: one for each disk. domains: rank -> its disk; all 0 where
    all see one. over: the saves beside it that are written no more. seen: the id of the save that the target
    held before.
    """

    series: CheckpointSeries
    target: Path
    save_id: str
    number: int
    numbered: bool
    rank: int
    domains: Sequence[int]
    firsts: Sequence[int]
    over: Collection[str]
    seen: str | None

    @classmethod
    def choose(
        cls,
        series: CheckpointSeries,
        control: Collectives,
        directory: str | os.PathLike[str] | None,
        domains: Sequence[int],
    ) -> Place:
        """The place of the next save: `directory`, or the next of the numbered ones. Collective.

        What killed saves left there is removed, and the folder to write into is made.

        Raises:
            CheckpointError: the target is there and is not a checkpoint, or a folder cannot be made.
        """
        numbered = directory is None
        firsts = [domains.index(disk) for disk in sorted(set(domains))]
        first = control.rank in firsts
        parent = series.folder if directory is None else Path(os.path.realpath(directory)).parent
        left = agree(control, lambda: leftovers(parent) if first else set())
        told = control.all_gather_object((new_save_id(series.run.run_id) if control.rank == 0 else "", left))
        save_id = told[0][0]
        # A process of another node may have made what lies on this disk: each rank knows its own machine.
        found: set[str] = set().union(*(each for _, each in told))
        if found:
            found = set().union(*control.all_gather_object({each for each in found if is_over(each)}))

        def look() -> int:
            # A save that was named on one disk only is loaded from under its other name on the next.
            clean(parent, found, all_is_committed=len(firsts) == 1)
            return series.free_number() if numbered else series.next_number

        number = max(control.all_gather_object(agree(control, lambda: look() if first else 0)))
        target = Path(os.path.realpath(parent / f"checkpoint_{number}" if directory is None else directory))
        try:
            seen = agree(control, lambda: begin(target, save_id) if first else None)
            series.number_from(number + 1)
            place = cls(series, target, save_id, number, numbered, control.rank, domains, firsts, found, seen)
            finalize(place, finish, save_id).atexit = False  # of one that Ctrl-C keeps from the caller
        except BaseException:  # of another rank, perhaps
            finish(save_id)
            raise
        return place

    @property
    def first(self) -> bool:
        """Whether this rank makes, names and removes folders."""
        return self.rank in self.firsts

    @property
    def folder(self) -> Path:
        """Where the save is written."""
        return partial_folder(self.target, self.save_id)

    @property
    def members(self) -> dict[str, Any]:
        """What the manifest says of it."""
        name = self.target.name if self.numbered else None
        ids = {"save_id": self.save_id, "run_id": self.series.run.run_id, "lineage": self.series.lineage}
        disks = [
            [rank for rank, disk in enumerate(self.domains) if disk == self.domains[one]]
            for one in self.firsts
        ]
        return {"name": name, "iteration": self.number, **ids, "domains": disks if len(disks) > 1 else []}

    def publish(self) -> None:
        """Give the complete folder its name. Not collective; by `first`."""
        here = self.domains[self.rank]
        ranks = {rank for rank, disk in enumerate(self.domains) if disk == here}
        publish(self.target, self.save_id, seen=self.seen, replace=not self.numbered, ranks=ranks)
        if self.numbered:
            self.series.published(self.number, self.save_id)

    def settle(self) -> None:
        """Remove what the new checkpoint replaces, once it has its name on all disks. As `publish`."""
        for old in replaced(self.target, self.save_id):
            discard(old, self.target)
        if self.numbered:
            self.series.retain(self.save_id)
        clean(self.target.parent, self.over, all_is_committed=True)

    def discard(self) -> None:
        """Leave nothing half-written. Not collective; by `first`; never raises, since a save has failed."""
        discard(self.folder, self.target)
        self.finish()

    def finish(self) -> None:
        """This process does nothing more for this save. By any rank, any number of times."""
        finish(self.save_id)
