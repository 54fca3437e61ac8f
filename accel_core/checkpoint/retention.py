"""Numbered checkpoints: the next number, the newest, and those that may go.

They are `PROJECT/checkpoints/checkpoint_N`. Numbers rise with every save, whatever the clock says. A
folder is one of them if its own manifest says that it was saved under this name; any other is foreign:
it is never picked and never removed. One rank of each disk looks at the folder and changes it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from accel_core.checkpoint.commit import discard
from accel_core.checkpoint.manifest import Manifest, is_there, manifest_if_any, read_manifest
from accel_core.checkpoint.metrics import best_first
from accel_core.checkpoint.stored import Place, StoredPath, UnreadableError, place
from accel_core.checkpoint.stored_commit import remove_stored
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.contract.run import Run

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"checkpoint_(0|[1-9]\d*)")
_WRITING: Final = re.compile(r"\.checkpoint_(0|[1-9]\d*)\..*\.partial")
Candidate: TypeAlias = tuple[int, bool]
"""Number of a checkpoint, and True for its copy in the store."""


class CheckpointSeries:
    """The checkpoints of a run and of the runs that it resumed.

    Only the series itself changes its attributes.

    next_number: the number of the next checkpoint, whether it is named by it or by the user.
    ancestors: ids of the runs whose state this one took over, the oldest first.
    kept: number -> save id, of the numbered checkpoints that `total_limit` counts.
    held: numbers of those that are not removed yet.
    """

    def __init__(self, run: Run, *, in_store: bool = False) -> None:
        self.run = run
        self.held: Collection[int] = ()
        self._in_store = in_store
        self._copies = None if in_store else CheckpointSeries(run, in_store=True)
        self._resumed: list[Manifest] = []
        """Checkpoints that were loaded, and whose ancestors `kept` lacks yet."""
        self.next_number = run.config.project.iteration
        self.ancestors: Sequence[str] = ()
        self.kept: dict[int, str] = {}

    @property
    def folder(self) -> Place:
        """The folder of the numbered checkpoints."""
        config = self.run.config.project
        project = place((config.store if self._in_store else config.project_dir) or ".")
        return (Path(os.path.realpath(project)) if isinstance(project, Path) else project) / "checkpoints"

    @property
    def copies(self) -> CheckpointSeries | None:
        """The copies in `project.store`, if there is one."""
        project = self.run.config.project
        return self._copies if project.store and project.automatic_checkpoint_naming else None

    @property
    def places(self) -> list[CheckpointSeries]:
        """The series itself, and that of its copies."""
        return [self] if self.copies is None else [self, self.copies]

    @property
    def where(self) -> str:
        """The folders, in words."""
        return " and ".join(str(each.folder) for each in self.places)

    @cached_property
    def _seen(self) -> list[tuple[int, Place]]:
        """The numbered folders when they were first looked at, the newest first."""
        return _numbered(self.folder, _NAME)

    @property
    def newest(self) -> int:
        """The highest number in the folder then, or -1."""
        return next((number for number, _ in self._seen), -1)

    @cached_property
    def newest_whole(self) -> int:
        """The highest number of a complete checkpoint then, or -1."""
        return next((number for number, path in self._seen if is_there(path)), -1)

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
        taken += [each.newest for each in self.places[1:]]
        number = max([self.next_number, *(each + 1 for each in taken)])
        if number > self.next_number:
            logger.warning(
                "%s: up to number %d there are checkpoints that this run neither wrote nor resumed from;"
                " they stay, and it goes on with number %d",
                *(self.where, number - 1, number),
            )
        return number

    def uncounted(self) -> list[Place]:
        """Return the numbered folders that `total_limit` does not count."""
        self._count_ancestors()
        return [path for number, path in _numbered(self.folder, _NAME) if number not in self.kept]

    def candidates(self, *, stored: bool) -> list[Candidate]:
        """Return the checkpoints that may be loaded, newest first.

        With `stored` also the copies. Those that this run and the runs which resumed it have saved; if there
        are none, all.
        """
        found: list[tuple[Candidate, Manifest | None]] = []
        for series in self.places if stored else [self]:
            for number, path in _numbered(series.folder, _NAME):
                manifest = manifest_if_any(path)  # None: loading it finds out why, and says so
                if manifest is None and isinstance(path, StoredPath) and not is_there(path):
                    logger.warning("passed over: %s holds a save that has not ended", path)
                    continue
                if manifest is None or manifest.name == path.name:
                    found.append(((number, series is not self), manifest))
                else:
                    logger.warning(
                        "passed over: %s was not saved under this name, but as %s", path, manifest.name
                    )
        found.sort(key=lambda each: (-each[0][0], each[0][1]))
        intact = [manifest for *_, manifest in found if manifest is not None]
        run_id = self.run.run_id
        if any(run_id in manifest.lineage for manifest in intact):
            found = [each for each in found if each[1] is None or run_id in each[1].lineage]
        elif intact:
            newest = intact[0]
            others = [
                each.name
                for each in intact
                if each.run_id not in newest.lineage and newest.run_id not in each.lineage
            ]
            if others:
                logger.warning(
                    "%s has checkpoints of several runs; the newest, %s, is taken, and %s is of another run",
                    *(self.where, newest.name, others[0]),
                )
        return [each for each, _ in found]

    def best_candidates(self, *, stored: bool) -> list[Candidate]:
        """Return those with the metric of `keep_best`, the best first.

        Also those that led to this run, which has saved others since.
        """
        found = self.candidates(stored=stored)
        for series in self.places if stored else [self]:
            series._count_ancestors()
            found += [(number, series is not self) for number in series.kept]
        manifests: dict[int, Manifest | None] = {}
        for number, is_copy in sorted(set(found)):
            manifests[number] = manifests.get(number) or _intact(self.path_of((number, is_copy)))
        best = best_first(self.run.config.project.keep_best, manifests)
        return [each for number in best for each in ((number, False), (number, True)) if each in found]

    def path_of(self, candidate: Candidate) -> Place:
        """Return the folder of a checkpoint, here or in the store."""
        number, is_copy = candidate
        return self.places[is_copy].folder / f"checkpoint_{number}"

    def _best_first(self, numbers: Iterable[int]) -> list[int]:
        found = {number: _intact(self.folder / f"checkpoint_{number}") for number in numbers}
        return best_first(self.run.config.project.keep_best, found)

    def resume(self, loaded: Manifest) -> None:
        """Go on from a checkpoint.

        Its lineage is this run's, and `total_limit` counts the checkpoints that led to it.
        """
        self.ancestors = loaded.lineage
        self.next_number = max(self.next_number, loaded.iteration + 1)  # numbers only rise
        project = self.run.config.project
        first = self.run.world.first_of_disk(each_node=project.save_on_each_node)
        for series in self.places if project.automatic_checkpoint_naming and first else ():
            series._resumed.append(loaded)
        if isinstance(self.folder, Path):  # a store is not asked before something needs to know
            self._count_ancestors()

    def _count_ancestors(self) -> None:
        """Count the checkpoints that led to those that were loaded.

        Raises:
            UnreadableError: the store does not answer.
        """
        here = _numbered(self.folder, _NAME) if self._resumed else ()
        for loaded in self._resumed:
            for number, path in here:
                manifest = manifest_if_any(path) if number <= loaded.iteration else None
                if manifest is not None and manifest.run_id in loaded.lineage:
                    self.kept[number] = manifest.save_id
        self._resumed = []

    def hold(self, numbers: Collection[int]) -> None:
        """Keep these, and no others, whatever `total_limit` says."""
        self.held = numbers

    def published(self, number: int, save_id: str) -> None:
        """Count a numbered checkpoint that has its name."""
        self.kept[number] = save_id

    def retain(self, save_id: str) -> None:
        """Remove the oldest that this run wrote or resumed from, down to `total_limit`.

        The best by `keep_best` stays. Renamed aside first: nothing half removed ever bears the name of a
        checkpoint. What no save wrote stays in a folder of that name. What fails is logged: the save itself
        is complete.
        """
        try:
            self._remove_over(save_id)
        except UnreadableError as error:  # so that nothing says which is the best: all stay
            logger.warning("total_limit is not applied now: %s", error)

    def _remove_over(self, save_id: str) -> None:
        project = self.run.config.project
        self._count_ancestors()
        over = sorted(self.kept)[: -project.total_limit if project.total_limit else 0]
        best = self._best_first(self.kept)[:1] if over else []
        for number in [number for number in over if number not in best and number not in self.held]:
            path = self.folder / f"checkpoint_{number}"
            manifest, expected = _intact(path), self.kept.pop(number)
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


def _intact(folder: Place) -> Manifest | None:
    """Return the manifest, None of a damaged checkpoint.

    Raises:
        UnreadableError: it cannot be read now, and may be whole.
    """
    try:
        return read_manifest(folder)
    except UnreadableError:
        raise
    except CheckpointError:
        return None


def _numbered(folder: Place, pattern: re.Pattern[str]) -> list[tuple[int, Place]]:
    """Return (number, path) of all entries with such a name, newest first."""
    entries: Iterable[Place] = folder.iterdir() if folder.is_dir() else ()
    named = [(int(name[1]), path) for path in entries if (name := pattern.fullmatch(path.name))]
    return sorted(named, key=itemgetter(0), reverse=True)
