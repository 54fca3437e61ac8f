"""Numbered checkpoints: the next number, the newest, and those that may go.

They are `PROJECT/checkpoints/checkpoint_N`. Numbers rise with every save, whatever the clock says. A
folder is one of them if its own manifest says that it was saved under this name; any other is foreign:
it is never picked and never removed. One rank of each disk looks at the folder and changes it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from accel_core.checkpoint.commit import discard
from accel_core.checkpoint.manifest import Manifest, manifest_if_any
from accel_core.checkpoint.metrics import best_first
from accel_core.checkpoint.stored import Place, StoredPath, place
from accel_core.checkpoint.stored_commit import remove_stored

if TYPE_CHECKING:
    from accel_core.contract.run import Run

__all__ = ["CheckpointSeries", "number_in"]

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"checkpoint_(0|[1-9]\d*)")
_WRITING: Final = re.compile(r"\.checkpoint_(0|[1-9]\d*)\..*\.partial")


class CheckpointSeries:
    """The checkpoints of a run and of the runs that it resumed.

    Only the series itself changes its attributes.

    next_number: the number of the next checkpoint, whether it is named by it or by the user.
    ancestors: ids of the runs whose state this one took over, the oldest first.
    kept: number -> save id, of the numbered checkpoints that `total_limit` counts.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.next_number = run.config.project.iteration
        self.ancestors: Sequence[str] = ()
        self.kept: dict[int, str] = {}

    @property
    def folder(self) -> Place:
        """The folder of the numbered checkpoints."""
        project = place(self.run.config.project.project_dir or ".")
        return (Path(os.path.realpath(project)) if isinstance(project, Path) else project) / "checkpoints"

    @property
    def lineage(self) -> list[str]:
        """Ids of the ancestors and of the run itself."""
        return [*dict.fromkeys([*self.ancestors, self.run.run_id])]

    def number_from(self, number: int) -> None:
        """Give the next checkpoint this number."""
        self.next_number = number

    def free_number(self) -> int:
        """Return a number above all in the folder, also above those that others save now."""
        taken = [number for pattern in (_NAME, _WRITING) for number, _ in _numbered(self.folder, pattern)]
        number = max([self.next_number, *(each + 1 for each in taken)])
        if number > self.next_number:
            logger.warning(
                "%s: up to number %d there are checkpoints that this run neither wrote nor resumed from;"
                " they stay, and it goes on with number %d",
                *(self.folder, number - 1, number),
            )
        return number

    def uncounted(self) -> list[Place]:
        """Return the numbered folders that `total_limit` does not count."""
        return [path for number, path in _numbered(self.folder, _NAME) if number not in self.kept]

    def candidates(self) -> list[str]:
        """Names of the checkpoints that may be loaded, newest first.

        Those that this run and the runs which resumed it have saved; if there are none, all.
        """
        found: list[tuple[Place, Manifest | None]] = []
        for _, path in _numbered(self.folder, _NAME):
            manifest = manifest_if_any(path)  # None: loading it finds out why, and says so
            if manifest is None or manifest.name == path.name:
                found.append((path, manifest))
            else:
                logger.warning(
                    "passed over: %s was not saved under this name, but as %s", path, manifest.name
                )
        intact = [manifest for _, manifest in found if manifest is not None]
        run_id = self.run.run_id
        if any(run_id in manifest.lineage for manifest in intact):
            found = [(path, it) for path, it in found if it is None or run_id in it.lineage]
        elif intact:
            newest = intact[0]
            others = [
                each
                for each in intact
                if each.run_id not in newest.lineage and newest.run_id not in each.lineage
            ]
            if others:
                logger.warning(
                    "%s has checkpoints of several runs; the newest, %s, is taken, and %s is of another run",
                    *(self.folder, newest.name, others[0].name),
                )
        return [path.name for path, _ in found]

    def best_candidates(self) -> list[str]:
        """Names of the checkpoints with the metric of `keep_best`, the best first.

        Also those that led to this run, which has saved others since.
        """
        numbers = {*map(number_in, self.candidates()), *self.kept}
        return [f"checkpoint_{number}" for number in self._best_first(numbers)]

    def _best_first(self, numbers: Iterable[int]) -> list[int]:
        found = {number: manifest_if_any(self.folder / f"checkpoint_{number}") for number in numbers}
        return best_first(self.run.config.project.keep_best, found)

    def resume(self, loaded: Manifest) -> None:
        """Go on from a checkpoint.

        Its lineage is this run's, and `total_limit` counts the checkpoints that led to it.
        """
        self.ancestors = loaded.lineage
        self.next_number = max(self.next_number, loaded.iteration + 1)  # numbers only rise
        project = self.run.config.project
        first = self.run.world.first_of_disk(each_node=project.save_on_each_node)
        for number, path in (
            _numbered(self.folder, _NAME) if project.automatic_checkpoint_naming and first else ()
        ):
            manifest = manifest_if_any(path) if number <= loaded.iteration else None
            if manifest is not None and manifest.run_id in loaded.lineage:
                self.kept[number] = manifest.save_id

    def published(self, number: int, save_id: str) -> None:
        """Count a numbered checkpoint that has its name."""
        self.kept[number] = save_id

    def retain(self, save_id: str) -> None:
        """Remove the oldest that this run wrote or resumed from, down to `total_limit`.

        The best by `keep_best` stays. Renamed aside first: nothing half removed ever bears the name of a
        checkpoint. What no save wrote stays in a folder of that name. What fails is logged: the save itself
        is complete.
        """
        project = self.run.config.project
        over = sorted(self.kept)[: -project.total_limit if project.total_limit else 0]
        best = self._best_first(self.kept)[:1] if over else []
        for number in [number for number in over if number not in best]:
            path, expected = self.folder / f"checkpoint_{number}", self.kept.pop(number)
            manifest = manifest_if_any(path)
            names = manifest and (manifest.name, manifest.save_id)
            if names != (path.name, expected) or (isinstance(path, Path) and path.is_symlink()):
                logger.warning("%s is not what this run saved; it stays", path)
                continue
            if isinstance(path, StoredPath):
                remove_stored(path)
                continue
            aside = path.with_name(f".{path.name}.{save_id}.removed")
            try:
                path.rename(aside)
            except OSError as error:
                logger.warning("%s could not be removed: %s", path, error)
                continue
            discard(aside, path)
            if path.exists():
                left = ", ".join(sorted(each.name for each in path.iterdir()))
                logger.warning(
                    "%s: the checkpoint is removed by total_limit; %s, not part of it, stays", path, left
                )


def number_in(name: str) -> int:
    """N of `checkpoint_N`."""
    return int(name.rpartition("_")[2])


def _numbered(folder: Place, pattern: re.Pattern[str]) -> list[tuple[int, Place]]:
    """Return (number, path) of all entries with such a name, newest first."""
    entries: Iterable[Place] = folder.iterdir() if folder.is_dir() else ()
    named = [(int(name[1]), path) for path in entries if (name := pattern.fullmatch(path.name))]
    return sorted(named, key=itemgetter(0), reverse=True)
