"""Where a save goes, agreed by all ranks: its id, its name, the folder it is written into."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from accel_core.checkpoint.agree import agree
from accel_core.checkpoint.commit import begin, clean, new_save_id, partial_folder, publish
from accel_core.checkpoint.series import folder_of, next_number, retain

if TYPE_CHECKING:
    from accel_core.run import Run

__all__ = ["Place"]


@frozen
class Place:
    """One save's target. `first`: this rank makes, names and removes folders; the others only write."""

    run: Run
    target: Path
    save_id: str
    number: int
    numbered: bool
    first: bool

    @classmethod
    def choose(cls, run: Run, directory: str | os.PathLike[str] | None) -> Place:
        """The place of the next save: `directory`, or the next of the numbered ones. Collective.

        What killed saves left there is removed, and the folder to write into is made.

        Raises:
            CheckpointError: the target is there and is not a checkpoint, or a folder cannot be made.
        """
        control, numbered = run.collectives("control"), directory is None
        first = control.rank == 0
        save_id: str = control.broadcast_object(new_save_id(run.run_id) if first else None)
        parent = folder_of(run) if directory is None else Path(os.path.realpath(directory)).parent

        def look() -> int:
            clean(parent, save_id, fence=run.world.run_id is not None)
            return next_number(run) if numbered else run.iteration

        number: int = control.broadcast_object(agree(control, lambda: look() if first else 0))
        target = Path(os.path.realpath(parent / f"checkpoint_{number}" if directory is None else directory))
        agree(control, lambda: begin(target, save_id) if first else None)
        run.iteration = number + 1
        return cls(run, target, save_id, number, numbered, first)

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
        return {"name": name, "iteration": self.number, **ids}

    def publish(self) -> None:
        """Give the complete folder its name; then the oldest may go. Not collective; by `first`."""
        publish(self.target, self.save_id, replace=not self.numbered)
        if self.numbered:
            self.run.kept[self.number] = self.save_id
            retain(self.run, self.save_id)

    def discard(self) -> None:
        """Leave nothing half-written. Not collective; by `first`; never raises, since a save has failed."""
        shutil.rmtree(self.folder, ignore_errors=True)
