"""Numbered checkpoints: choose the next number, find the newest or best, and remove old checkpoints.

The checkpoints are `FOLDER/checkpoint_N`. Numbers rise with every save, and do not depend on the clock. A
folder belongs to the series if its own manifest has the folder's name; any other folder is foreign, and is
never loaded and never removed. One rank of each disk reads and changes the folder.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from accel_core.errors import CheckpointError
from accel_core.storage.commit import commits, intact, prune, remove
from accel_core.storage.files import UnreadableError, listed

if TYPE_CHECKING:
    from accel_core.storage.commit import Manifest
    from accel_core.storage.protocols import Storage

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"checkpoint_(0|[1-9]\d*)")


@frozen
class Numbering:
    """The settings of a series."""

    folder: Storage
    run_id: str
    limit: int | None = None
    """Number of checkpoints to keep; None keeps all."""
    best: tuple[str, bool] | None = None
    """(metric, True if larger is better): the best checkpoint by this metric is kept too."""


class Series:
    """The checkpoints of a run and of the runs that it resumed.

    Attributes:
        next_number: number of the next checkpoint, also if the user names the checkpoint. Read-only.
        ancestors: ids of the runs from which this run has resumed, the oldest first. Read-only.
    """

    def __init__(self, numbering: Callable[[], Numbering], first: int = 0) -> None:
        self._numbering = numbering
        self.next_number = first
        self.ancestors: Sequence[str] = ()
        self._others: set[int] = set()
        """Numbers of checkpoints that this run neither wrote nor resumed from, even if of its lineage."""
        self._clean = 0
        """Number below which no files of killed saves remain."""
        self._read: dict[int, Manifest] = {}
        """Number -> manifest without its files: a cache, so that `apply_limit` reads each manifest once."""

    @property
    def folder(self) -> Storage:
        """The folder of the numbered checkpoints."""
        return self._numbering().folder

    @property
    def lineage(self) -> list[str]:
        """Ids of the ancestors and of the run itself."""
        return [*dict.fromkeys([*self.ancestors, self._numbering().run_id])]

    def copied_to(self, folder: Storage, limit: int | None) -> Series:
        """Return the series of the copies of these checkpoints in another folder."""
        return Series(lambda: evolve(self._numbering(), folder=folder, limit=limit))

    def number_from(self, number: int) -> None:
        """Give the next checkpoint this number."""
        self.next_number = number

    def path_of(self, number: int) -> Storage:
        """Return the folder of a checkpoint."""
        return self.folder.at(f"checkpoint_{number}")

    def free_number(self) -> int:
        """Return a number above all numbers in the folder, including saves of other runs in progress."""
        self.clear()
        others = [number for number in self._numbers() if number >= self.next_number]
        self._others.update(others)
        number = max(others, default=self.next_number - 1) + 1
        if others:
            logger.warning(
                "%s: up to number %d there are checkpoints that this run neither wrote nor resumed from;"
                " they stay, and it goes on with number %d",
                *(self.folder, number - 1, number),
            )
        return number

    def clear(self) -> None:
        """Remove the files of killed saves. Folders that may still be written are checked again later."""
        left = []
        for number in [number for number in self._numbers() if number >= self._clean]:
            place = self.path_of(number)
            if not commits(place):
                prune(place, 0)
                with suppress(OSError):
                    place.remove([])
                left += [number] if listed(place) else []
        self._clean = min([self.next_number, *left])

    def _there(self) -> dict[int, Manifest | None]:
        """Return number -> manifest of each checkpoint of the series, the newest first; None if damaged."""
        found: dict[int, Manifest | None] = {}
        for number in sorted(self._numbers(), reverse=True):
            place = self.path_of(number)
            manifest = intact(place)
            is_one = bool(commits(place)) if manifest is None else manifest.name == place.name
            if is_one:
                found[number] = manifest
        return found

    def candidates(self, *, best: bool = False) -> list[int]:
        """Return the numbers of checkpoints that may be loaded, the newest or best first.

        Checkpoints saved by this run, or by runs that resumed it, are candidates; if there are none, all
        checkpoints are. With `best`, checkpoints of the runs that this run resumed are candidates too.
        """
        found = self._there()  # a damaged one stays a candidate: the load reports the damage
        for number in sorted({*self._numbers()} - found.keys()):
            place = self.path_of(number)
            logger.warning("passed over: %s holds no whole save of this number", place)
        mine = self._mine(found)
        if not best:
            return mine
        return self._best_first({n: each for n, each in found.items() if n in mine or self._is_own(each)})

    def _is_own(self, manifest: Manifest | None) -> bool:
        """Return True if this run saved the checkpoint, or an ancestor did before this run resumed."""
        return (
            manifest is not None
            and manifest.run_id in self.lineage
            and manifest.iteration not in self._others
        )

    def _mine(self, found: Mapping[int, Manifest | None]) -> list[int]:
        intact_ones = [manifest for manifest in found.values() if manifest is not None]
        run_id = self._numbering().run_id
        # If this run or a run that resumed it has saved here, checkpoints of other runs are not candidates.
        if any(run_id in manifest.lineage for manifest in intact_ones):
            return [number for number, each in found.items() if each is None or run_id in each.lineage]
        if intact_ones:
            newest = intact_ones[0]
            others = [
                each.name
                for each in intact_ones
                if each.run_id not in newest.lineage and newest.run_id not in each.lineage
            ]
            if others:
                logger.warning(
                    "%s has checkpoints of several runs; the newest, %s, is taken, and %s is of another run",
                    *(self.folder, newest.name, others[0]),
                )
        return [*found]

    def _best_first(self, manifests: Mapping[int, Manifest | None]) -> list[int]:
        """Return the numbers of checkpoints that have the metric, the best first.

        Checkpoints with a metric of NaN are left out. Among equal metrics the lowest number is first.
        """
        if (best := self._numbering().best) is None:
            return []
        name, is_largest = best
        metrics = {number: each.members.get("metrics", {}) for number, each in manifests.items() if each}
        values = {number: float(each[name]) for number, each in metrics.items() if name in each}
        ranked = [number for number in sorted(values) if not math.isnan(values[number])]
        return sorted(ranked, key=lambda number: -values[number] if is_largest else values[number])

    def resume(self, loaded: Manifest) -> None:
        """Continue from a loaded checkpoint: take over its lineage, and number later checkpoints above it."""
        self.ancestors, self._clean = loaded.lineage, 0
        self.next_number = max(self.next_number, loaded.iteration + 1)

    def apply_limit(self) -> None:
        """Remove the oldest checkpoints that this run wrote or resumed from, down to the limit.

        The best checkpoint and claimed checkpoints are kept. Failures are logged, not raised: the save itself
        is complete.
        """
        limit = self._numbering().limit
        if limit is None:
            return
        try:
            own = {n: each for n, each in self._read_before().items() if self._is_own(each)}
            best = self._best_first(own)[:1]
            for number in sorted(own)[:-limit]:
                place = self.path_of(number)
                manifest = None if number in best else intact(place)  # maybe replaced since
                if self._is_own(manifest) and manifest and not place.at(manifest.save_id).is_claimed():
                    self._remove(place)
        except (OSError, UnreadableError) as error:  # the best checkpoint is unknown
            logger.warning("total_limit is not applied now: %s", error)

    def _read_before(self) -> Mapping[int, Manifest]:
        """Return number -> manifest of each whole checkpoint. Manifests read by earlier calls are reused."""
        numbers = {*self._numbers()}
        self._read = {number: each for number, each in self._read.items() if number in numbers}
        for number in numbers - self._read.keys():
            manifest = intact(place := self.path_of(number))
            if manifest is not None and manifest.name == place.name:
                self._read[number] = evolve(manifest, files={})
        return self._read

    def _remove(self, place: Storage) -> None:
        try:
            left = remove(place)
        except (OSError, CheckpointError) as error:
            logger.warning("%s could not be removed: %s", place, error)
            return
        if left:
            logger.warning(
                "%s: the checkpoint is removed by total_limit; %s, not part of it, stays",
                *(place, ", ".join(sorted(left))),
            )

    def _numbers(self) -> list[int]:
        """Return the numbers of all entries named `checkpoint_N`."""
        return [int(named[1]) for name in listed(self.folder) if (named := _NAME.fullmatch(name))]
