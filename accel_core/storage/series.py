"""Numbered checkpoints: the next number, the newest, and those that may go.

They are `FOLDER/checkpoint_N`. Numbers rise with every save, whatever the clock says. A folder is one of
them if its own manifest says that it was saved under this name; any other is foreign: it is never picked and
never removed. One rank of each disk looks at the folder and changes it.
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
    """The settings that a series goes by.

    limit: how many checkpoints are kept; None: all. best: name of the metric by which one more is kept, and
    whether it is the largest.
    """

    folder: Storage
    run_id: str
    limit: int | None = None
    best: tuple[str, bool] | None = None


class Series:
    """The checkpoints of a run and of the runs that it resumed.

    Only the series itself changes its attributes.

    next_number: the number of the next checkpoint, whether it is named by it or by the user.
    ancestors: ids of the runs whose state this one took over, the oldest first.
    """

    def __init__(self, numbering: Callable[[], Numbering], first: int = 0) -> None:
        self._numbering = numbering
        self.next_number = first
        self.ancestors: Sequence[str] = ()
        self._others: set[int] = set()
        """Numbers of checkpoints that this run neither wrote nor resumed from, whatever their lineage."""
        self._clean = 0
        """Number below which killed saves have left nothing."""
        self._read: dict[int, Manifest] = {}
        """Manifests, without their files, that `apply_limit` has read before: a save reads none again."""

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
        """Return a number above all in the folder, also above those that others save now."""
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
        """Remove what killed saves have left; what somebody may be writing still is looked at again."""
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
        """Return number -> manifest of each that was saved under this number, None of a damaged one.

        The newest is first.
        """
        found: dict[int, Manifest | None] = {}
        for number in sorted(self._numbers(), reverse=True):
            place = self.path_of(number)
            manifest = intact(place)
            is_one = bool(commits(place)) if manifest is None else manifest.name == place.name
            if is_one:
                found[number] = manifest
        return found

    def candidates(self, *, best: bool = False) -> list[int]:
        """Return the numbers of checkpoints that may be loaded, newest or best first.

        Those that this run and the runs which resumed it have saved; if there are none, all. Of the best also
        those that led to this run, which has saved others since.
        """
        found = self._there()  # None: loading it finds out why, and says so
        for number in sorted({*self._numbers()} - found.keys()):
            place = self.path_of(number)
            logger.warning("passed over: %s holds no whole save of this number", place)
        mine = self._mine(found)
        if not best:
            return mine
        return self._best_first({n: each for n, each in found.items() if n in mine or self._is_own(each)})

    def _is_own(self, manifest: Manifest | None) -> bool:
        """Return True if this run saved it, or one that this run has resumed, before it went on."""
        return (
            manifest is not None
            and manifest.run_id in self.lineage
            and manifest.iteration not in self._others
        )

    def _mine(self, found: Mapping[int, Manifest | None]) -> list[int]:
        intact_ones = [manifest for manifest in found.values() if manifest is not None]
        run_id = self._numbering().run_id
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

        NaN is not among them. Of equal ones the earliest is first.
        """
        if (best := self._numbering().best) is None:
            return []
        name, is_largest = best
        metrics = {number: each.members.get("metrics", {}) for number, each in manifests.items() if each}
        values = {number: float(each[name]) for number, each in metrics.items() if name in each}
        ranked = [number for number in sorted(values) if not math.isnan(values[number])]
        return sorted(ranked, key=lambda number: -values[number] if is_largest else values[number])

    def resume(self, loaded: Manifest) -> None:
        """Go on from a checkpoint: its lineage is this run's, and numbers only rise."""
        self.ancestors, self._clean = loaded.lineage, 0
        self.next_number = max(self.next_number, loaded.iteration + 1)

    def apply_limit(self) -> None:
        """Remove the oldest that this run wrote or resumed from, down to the limit.

        The best one stays, and each that somebody has claimed. What fails is logged: the save itself is
        complete.
        """
        limit = self._numbering().limit
        if limit is None:
            return
        try:
            own = {n: each for n, each in self._read_before().items() if self._is_own(each)}
            best = self._best_first(own)[:1]
            for number in sorted(own)[:-limit]:
                place = self.path_of(number)
                manifest = None if number in best else intact(place)  # as it is now
                if self._is_own(manifest) and manifest and not place.at(manifest.save_id).is_claimed():
                    self._remove(place)
        except (OSError, UnreadableError) as error:  # so that nothing says which is the best
            logger.warning("total_limit is not applied now: %s", error)

    def _read_before(self) -> Mapping[int, Manifest]:
        """Return number -> manifest of each whole one in the folder; those of earlier calls are not read."""
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
        """Return the numbers of all entries with such a name."""
        return [int(named[1]) for name in listed(self.folder) if (named := _NAME.fullmatch(name))]
