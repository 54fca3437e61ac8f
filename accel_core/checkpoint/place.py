"""Where a save goes, agreed by all ranks: its id, its name, the folder it is written into."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from accel_core.checkpoint.agree import agree
from accel_core.checkpoint.commit import begin, clean, new_save_id, partial_folder, publish
from accel_core.checkpoint.series import folder_of, next_number, retain

if TYPE_CHECKING:
    from accel_core.run import Run
    from accel_core.world import Collectives

__all__ = ["Place"]


@frozen
class Place:
    """One save's target. Some ranks make, name and remove folders, the others only write.

    firsts: those ranks, one for each disk. domains: rank -> its disk; all 0 where all see one.
    first: whether this rank is one of them.
    """

    run: Run
    target: Path
    save_id: str
    number: int
    numbered: bool
    domains: Sequence[int]
    firsts: Sequence[int]
    first: bool

    @classmethod
    def choose(
        cls,
        run: Run,
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
        save_id: str = control.broadcast_object(new_save_id(run.run_id) if first else None)
        parent = folder_of(run) if directory is None else Path(os.path.realpath(directory)).parent

        def look() -> int:
            # A save that was named on one disk only is loaded from under its other name on the next.
            single = len(firsts) == 1
            clean(parent, save_id, fence=run.world.run_id is not None, all_is_committed=single)
            return next_number(run) if numbered else run.iteration

        number = max(control.all_gather_object(agree(control, lambda: look() if first else 0)))
        target = Path(os.path.realpath(parent / f"checkpoint_{number}" if directory is None else directory))
        agree(control, lambda: begin(target, save_id) if first else None)
        run.iteration = number + 1
        return cls(run, target, save_id, number, numbered, domains, firsts, first)

    @property
    def folder(self) -> Path:
        """Where the save is written."""
        return partial_folder(self.target, self.save_id)

    @property
    def members(self) -> dict[str, Any]:
        """What the manifest says of it."""
        name = self.target.name if self.numbered else None
        lineage = [*dict.fromkeys([*self.run.ancestors, self.run.run_id])]
        ids = {"save_id": self.save_id, "run_id": self.run.run_id, "lineage": lineage}
        disks = [
            [rank for rank, disk in enumerate(self.domains) if disk == self.domains[one]]
            for one in self.firsts
        ]
        return {"name": name, "iteration": self.number, **ids, "domains": disks if len(disks) > 1 else []}

    def publish(self) -> None:
        """Give the complete folder its name. Not collective; by `first`."""
        publish(self.target, self.save_id, replace=not self.numbered)
        if self.numbered:
            self.run.kept[self.number] = self.save_id

    def settle(self) -> None:
        """Remove what the new checkpoint replaces, once it has its name on all disks. As `publish`."""
        if self.numbered:
            retain(self.run, self.save_id)
        fence = self.run.world.run_id is not None
        clean(self.target.parent, self.save_id, fence=fence, all_is_committed=True)

    def discard(self) -> None:
        """Leave nothing half-written. Not collective; by `first`; never raises, since a save has failed."""
        shutil.rmtree(self.folder, ignore_errors=True)
