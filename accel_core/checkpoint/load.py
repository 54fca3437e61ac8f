"""Load a checkpoint: choose, compare, verify, and only then restore.

The ranks meet in five collective rounds: "look" chooses among commits, "read" opens one, "compare" plans the
actions, "verify" reads every byte that they need, and "restore" runs them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from attrs import frozen

from accel_core.checkpoint.sections import SECTIONS
from accel_core.checkpoint.tasks import Restoration
from accel_core.errors import CheckpointError
from accel_core.storage.commit import SAVE, commits, manifests, not_a_checkpoint
from accel_core.storage.files import DamagedError, listed, malformed_as_damaged
from accel_core.storage.loading import load_planned
from accel_core.storage.ranks import first_here, firsts

if TYPE_CHECKING:
    from accel_core.contract.run import Run
    from accel_core.storage.commit import Manifest
    from accel_core.storage.protocols import Comm, Storage
    from accel_core.storage.series import Series
    from accel_core.storage.tensors import Checkpoint

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A checkpoint that all disks have."""

    number: int | None
    """None for a folder that the caller named."""
    save_id: str | None
    """None if the manifest is damaged."""
    nonce: str
    """Text that is the same on all ranks, and used by no other load."""


_Seen: TypeAlias = tuple[str, list[tuple[int | None, list[str]]]]
"""A nonce, and (number, save ids) of each checkpoint on a rank's disk."""


@frozen
class Search:
    """The checkpoints to load from: `place`, or the checkpoints of the series, newest or best first."""

    series: Series
    place: Storage | None
    """The checkpoint's folder; None for the series."""
    best: str | None = None
    """The metric by which checkpoints are sorted; None for the newest first."""
    missing_ok: bool = False
    """True if a load that finds no checkpoint returns None instead of raising."""

    def look(self) -> list[tuple[int | None, list[str]]]:
        """Return (number, save ids, newest first) of each checkpoint on this disk."""
        if self.place is not None:
            entries = listed(self.place)
            if not commits(self.place) and (not entries or any(map(SAVE.fullmatch, entries))):
                return []  # only killed saves have written here
            return [(None, [manifest.save_id for manifest in manifests(self.place)])]
        numbers = self.series.candidates(best=self.best is not None)
        if self.best is not None and not numbers and self.series.candidates():
            raise self._none_there("to take the newest, load_state()")
        return [
            (number, [manifest.save_id for manifest in manifests(self.series.path_of(number))])
            for number in numbers
        ]

    def at(self, choice: Choice) -> Storage:
        """Return the checkpoint's folder."""
        if choice.number is None:
            assert self.place is not None
            return self.place
        return self.series.path_of(choice.number)

    @property
    def folder(self) -> Storage:
        """The folder of the checkpoint or of the series."""
        return self.place or self.series.folder

    def nothing(self, tried: int, lacking: Sequence[str]) -> CheckpointError:
        """Return the error if no checkpoint was loaded; `lacking`: descriptions of incomplete checkpoints."""
        if lacking:
            return CheckpointError(
                f"{lacking[0]}\ncopy its folder to where it is missing, or load another: load_state('path')",
                path=str(self.folder),
            )
        if self.place is not None:
            return not_a_checkpoint(self.place)
        if not tried:
            return self._none_there("to start without one, load_state(missing_ok=True)")
        return CheckpointError(
            f"none of the {tried} checkpoints in {self.folder} can be loaded, the log says why\n"
            "restore one of them, or load another: accelerator.load_state('path/of/the/checkpoint')",
            path=str(self.folder),
        )

    def _none_there(self, remedy: str) -> CheckpointError:
        metric = f" with a value of {self.best!r}" if self.best else ""
        text = f"there is no checkpoint{metric} in {self.folder}\n{remedy}"
        return CheckpointError(text, path=str(self.folder))


def load(
    run: Run, comm: Comm, search: Search, *, strict: bool, wait_for_previous_save: Callable[[], None]
) -> tuple[Storage, Manifest, dict[str, Any]] | None:
    """Load a checkpoint; return its folder, manifest and `extra`, or None. See `CheckpointSession.load`.

    Args:
        run: the run to restore.
        comm: the ranks that load.
        search: the checkpoints to choose from.
        strict: whether all differences are errors.
        wait_for_previous_save: waits for a save under way, and raises if it failed.
    """

    def look() -> _Seen:
        wait_for_previous_save()
        return token_hex(8), search.look() if first_here(comm, search.folder) else []

    def plan(checkpoint: Checkpoint) -> Restoration:
        with malformed_as_damaged(checkpoint.place, calls_plugins=True):
            return compare(run, checkpoint, strict=strict)

    choices, lacking = _choices(comm, search, look)
    for each in lacking if comm.rank == 0 else ():
        logger.warning("passed over: %s", each)
    tried: list[int | None] = []
    while choices:
        choice = choices.pop(0)
        place = search.at(choice)
        try:
            manifest, restoration = load_planned(comm, place, choice.save_id, choice.nonce, plan)
        except DamagedError as error:
            now = [each for each in _choices(comm, search, look)[0] if each.number == choice.number]
            if now and now[0].save_id != choice.save_id:  # another save has taken its place meanwhile
                choices.insert(0, now[0])
                continue
            if search.place is not None:
                raise
            tried.append(choice.number)
            if comm.rank == 0:
                logger.warning("passed over: %s", str(error))  # a record of the error keeps its traceback
        else:
            return place, manifest, restoration.extra
    if search.missing_ok and not (tried or lacking):
        return None
    raise search.nothing(len(tried), lacking)


def compare(run: Run, checkpoint: Checkpoint, *, strict: bool) -> Restoration:
    """Return the actions that bring a run into a checkpoint's state. The run is not changed.

    Raises:
        MisfitError: the checkpoint does not fit the run.
    """
    restoration = Restoration(run, checkpoint, strict=strict)
    for section in SECTIONS:
        section.plan(restoration)
    restoration.problems.raise_if_any()
    return restoration


def _choices(comm: Comm, search: Search, look: Callable[[], _Seen]) -> tuple[list[Choice], list[str]]:
    """Return the checkpoints that all disks have, in the order to try, and descriptions of the others.

    Takes one collective round. Some disks lack a checkpoint if a node was killed before its commit, or lost
    its disk.
    """
    found = comm.together("load_state: look", look)
    nonce, leading = found[0][0], firsts(comm, search.folder)
    disks = {comm.nodes[rank]: dict(found[rank][1]) for rank in leading}
    chosen, lacking = list[Choice](), list[str]()
    for number in dict.fromkeys(each for disk in disks.values() for each in disk):
        saves = {node: disk[number] for node, disk in disks.items() if number in disk}
        if missing := [node for node in disks if node not in saves]:
            where = search.at(Choice(number, None, nonce))
            lacking.append(
                f"{where} is on node {', '.join(map(str, saves))}, not on {', '.join(map(str, missing))}"
            )
            continue
        first, *others = saves.values()
        common = next((each for each in first if all(each in other for other in others)), None)
        if common is None and first and all(others):
            raise CheckpointError(
                f"ranks see different checkpoints in {search.folder}: saves {first[0]}, {others[0][0]}\n"
                "give all ranks the same directory, on a disk that all nodes share",
                path=str(search.folder),
            )
        chosen.append(Choice(number, common, nonce))
    return chosen, lacking
