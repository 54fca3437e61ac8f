"""Numbered checkpoints: the next number, the newest, and those that may go.

They are `FOLDER/checkpoint_N`. Numbers rise with every save, whatever the clock says. A folder is one of
them if its own manifest says that it was saved under this name; any other is foreign: it is never picked and
never removed. One rank of each disk looks at the folder and changes it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from accel_core.errors import CheckpointError
from accel_core.storage.commit import commits, intact, prune, remove
from accel_core.storage.files import UnreadableError, listed

if TYPE_CHECKING:
    from accel_core.storage.manifest import Manifest
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
    kept: number -> save id, of the numbered checkpoints that the limit counts.
    """

    def __init__(self, numbering: Callable[[], Numbering], first: int = 0) -> None:
        self._numbering = numbering
        self.next_number = first
        self.ancestors: Sequence[str] = ()
        self.kept: dict[int, str] = {}
        self._unfinished: set[int] | None = None
        """Numbers of folders without a checkpoint, as they were looked at last."""

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
        there, known = {*self._numbers()} - self.kept.keys(), self._unfinished
        # Older ones that others have saved are looked at once.
        looked = (
            there if known is None else {each for each in there if each >= self.next_number or each in known}
        )
        unfinished = {number for number in looked if not commits(self.path_of(number))}
        self._clear(unfinished)
        self._unfinished = {number for number in unfinished if listed(self.path_of(number))}
        taken = [*self.kept, *(there - unfinished), *self._unfinished]
        number = max([self.next_number, *(each + 1 for each in taken)])
        if number > self.next_number:
            logger.warning(
                "%s: up to number %d there are checkpoints that this run neither wrote nor resumed from;"
                " they stay, and it goes on with number %d",
                *(self.folder, number - 1, number),
            )
        return number

    def clear(self, numbers: Iterable[int] | None = None) -> None:
        """Remove what killed saves have left, of these numbers or of all."""
        there = self._numbers() if numbers is None else numbers
        self._clear(number for number in there if not commits(self.path_of(number)))

    def _clear(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            place = self.path_of(number)
            prune(place, 0)
            with suppress(OSError):
                place.remove([])

    def candidates(self, *, best: bool = False) -> list[int]:
        """Return the numbers of checkpoints that may be loaded, newest or best first.

        Those that this run and the runs which resumed it have saved; if there are none, all. Of the best also
        those that led to this run, which has saved others since.
        """
        found: dict[int, Manifest | None] = {}
        for number in sorted(self._numbers(), reverse=True):
            place = self.path_of(number)
            if not commits(place):
                if listed(place):
                    logger.warning("passed over: %s holds no save that has ended", place)
                continue
            manifest = intact(place)  # None: loading it finds out why, and says so
            if manifest is None or manifest.name == place.name:
                found[number] = manifest
            else:
                logger.warning(
                    "passed over: %s was not saved under this name, but as %s", place, manifest.name
                )
        mine = self._mine(found)
        if not best:
            return mine
        return self._best_first({number: found.get(number) for number in {*mine, *self.kept}})

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

    def resume(self, loaded: Manifest, *, counts: bool) -> None:
        """Go on from a checkpoint: its lineage is this run's.

        counts: the limit counts the checkpoints that led to it. By the first rank of each disk.
        """
        self.ancestors, self._unfinished = loaded.lineage, None
        self.next_number = max(self.next_number, loaded.iteration + 1)  # numbers only rise
        for number in self._numbers() if counts else ():
            manifest = intact(self.path_of(number)) if number <= loaded.iteration else None
            if manifest is not None and manifest.run_id in loaded.lineage:
                self.kept[number] = manifest.save_id

    def committed(self, number: int, save_id: str) -> None:
        """Count a checkpoint, and remove the oldest that this run wrote or resumed from, down to the limit.

        The best one stays, and each that somebody has claimed. What fails is logged: the save itself is
        complete.
        """
        self.kept[number] = save_id
        try:
            self._remove_over()
        except (OSError, UnreadableError) as error:  # so that nothing says which is the best
            logger.warning("total_limit is not applied now: %s", error)

    def _remove_over(self) -> None:
        numbering = self._numbering()
        over = sorted(self.kept)[: -numbering.limit if numbering.limit else 0]
        found = {number: intact(self.path_of(number)) for number in (self.kept if over else ())}
        best = self._best_first(found)[:1]
        for number in [number for number in over if number not in best]:
            place, manifest, expected = self.path_of(number), found[number], self.kept[number]
            if manifest is not None and place.at(manifest.save_id).is_claimed():
                continue  # by the next save
            if not commits(place):  # it was removed, or half of it
                del self.kept[number]
                self._clear({number}.intersection(self._numbers()))
                continue
            if manifest is None or (manifest.name, manifest.save_id) != (place.name, expected):
                logger.warning("%s is not what this run saved; it stays", place)
                del self.kept[number]
                continue
            try:
                left = remove(place)
            except (OSError, CheckpointError) as error:
                logger.warning("%s could not be removed: %s", place, error)
                continue
            del self.kept[number]
            if left:
                logger.warning(
                    "%s: the checkpoint is removed by total_limit; %s, not part of it, stays",
                    *(place, ", ".join(sorted(left))),
                )

    def _numbers(self) -> Iterable[int]:
        """Return the numbers of all entries with such a name."""
        return [int(named[1]) for name in listed(self.folder) if (named := _NAME.fullmatch(name))]
