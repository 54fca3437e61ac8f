"""Copies of numbered checkpoints in `project.store`, made in the background.

    save N, committed on the local disk
    its copy, in a thread of each rank that saved, with votes as a save has them (see `pending_save`):
        rank 0 begins in the store, as a save to a URL does, and tells the others
        each rank sends its files, and votes
        rank 0 commits, and removes what is over `total_limit` there

One copy is made at a time. The local checkpoint is held until its copy is committed. A copy that fails is
made again by each next save, until it is there or a newer one is due. What a kill has cut is made up when
the newest checkpoint is loaded.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attrs import define, frozen

from accel_core.checkpoint import stored_commit, unreported
from accel_core.checkpoint.agree import gather_from_all_ranks
from accel_core.checkpoint.disks import Disks
from accel_core.checkpoint.manifest import commits_in, read_manifest
from accel_core.checkpoint.pending_save import PendingSave, Share
from accel_core.checkpoint.sending import Sending, do_once
from accel_core.checkpoint.stored import StoredPath
from accel_core.checkpoint.stored_target import StoredTarget
from accel_core.checkpoint.target import SaveTarget
from accel_core.checkpoint.votes import Votes, work_together
from accel_core.checkpoint.writer import begin_writing, is_over
from accel_core.distributed.progress import show_progress
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.files import FileRecord
    from accel_core.checkpoint.manifest import Manifest
    from accel_core.checkpoint.retention import CheckpointSeries

logger = logging.getLogger(__name__)

_OF_THE_FILE: Final = ("format", "version", "files", "checksum")
"""Members of a manifest that are written anew."""


@frozen
class Plan:
    """The copies that a rank knows of when a save begins.

    owed: number of the checkpoint whose copy is to be made, or is being made. is_idle: no copy is being
    made. due: number from which a checkpoint is copied.
    """

    owed: int | None = None
    is_idle: bool = True
    due: int = 0


Source: TypeAlias = Mapping[str, Any]
"""Members of the manifest of a local checkpoint that is to be copied.

Those `_OF_THE_FILE` are not among them.
"""


@define(eq=False)
class CopyTarget(StoredTarget):
    """The place of a copy. local: the checkpoint that is copied."""

    local: Path
    votes: Votes

    def write(self, write: Callable[[Path], dict[str, FileRecord]], size: int) -> dict[str, FileRecord]:
        """Send this rank's files, unless the copy is there already; name -> record."""
        del write, size
        rank, ranks = self.disks.rank, len(self.disks.of_rank)
        is_new = False
        if rank == 0:
            try:
                is_new = self._begin()
            finally:  # the others wait for it
                self.votes.publish("begin", {"is_new": is_new})
        else:
            begun = self.votes.poll("begin", time.monotonic() + self.votes.timeout, unless="verdict", rank=0)
            is_new = begun is not None and begun["is_new"]
        records = {
            name: record
            for name, record in read_manifest(self.local).files.items()
            if _sender(name, ranks) == rank
        }
        for name in records if is_new else ():
            (self.folder / name).send(self.local / name)
        return records

    def _begin(self) -> bool:
        """Return True if the files are to be sent.

        What killed copies left is removed.

        Raises:
            CheckpointError: the store does not answer or takes no commits; another run has this number.
        """
        if read_manifest(self.local).save_id != self.save_id:
            raise CheckpointError(
                f"{self.local} is another save than the one to be copied\n"
                "give each run a project_dir of its own"
            )
        around = [path for path in self.series.uncounted() if isinstance(path, StoredPath)]
        left = set().union(*map(stored_commit.unfinished, around))
        stored_commit.remove_unfinished(around, {each for each in left if is_over(each)})
        commits = commits_in(self.path.listed())
        if not commits:
            begin_writing(self.save_id)
            self.commit = stored_commit.begin(self.path, self.save_id)
            return True
        self.commit = max(commits)  # its answer was lost
        if not stored_commit.is_committed(self.path, self.save_id, self.commit):
            raise CheckpointError(
                f"{self.path} is another run's checkpoint; it was left as it is\n"
                "give each run a project.store of its own"
            )
        return False


class Copies:
    """The copies of a run's numbered checkpoints, as one rank makes them."""

    def __init__(self, series: CheckpointSeries) -> None:
        self._series = series
        self._owed: Source | None = None
        self._last: int | None = None
        """Number of the last checkpoint whose copy was due."""
        self._error: Exception | None = None
        self._making: Source | None = None
        """The copy that the thread makes, or made last."""
        self._sending: Sending | None = None
        self._done = threading.Event()
        self._done.set()

    def plan(self, *, at_once: bool = False) -> Plan:
        """Return the copies that this rank knows of.

        Each save begins with it, on all ranks. at_once: the checkpoint is copied, whatever its number.

        Raises:
            UnreadableError: it is the first, and the store does not answer.
        """
        project, store = self._series.run.config.project, self._series.copies
        if store is None:
            return Plan()
        last = store.newest_whole if self._last is None else self._last
        owed = None if self._owed is None else self._owed["iteration"]
        return Plan(owed, self._done.is_set(), 0 if at_once or last < 0 else last + project.store_every)

    def follow(self, save: PendingSave, plans: Sequence[Plan], votes: Votes) -> None:
        """Copy the checkpoint of this save, if it is due, or an earlier one again.

        It does so once the save is committed. Waits for the copy before. Collective: all ranks that save.

        plans: those of all these ranks.
        """
        target, first = save.target, plans[0]
        is_due = isinstance(target, SaveTarget) and target.numbered and target.number >= first.due
        is_owed = first.is_idle and first.owed is not None and {plan.owed for plan in plans} == {first.owed}
        if self._series.copies is None or not (is_due or is_owed):
            return
        is_free = all(plan.is_idle for plan in plans) or self.wait_together("save_state", len(plans))
        if not is_free:
            return  # the next save looks again
        source, last = (save.manifest, target.number) if is_due else (self._owed, self._last)
        if source is not None:
            self._start(source, last, save, _all_together(save.share.rank, save.ranks), votes)

    def make_up(self, loaded: Manifest) -> None:
        """Copy the newest local checkpoint, which was loaded, if it was due.

        A kill came before its end. Collective. It begins to; `wait` waits for it.
        """
        run, number, plan = self._series.run, loaded.iteration, self.plan()
        disks = _all_together(run.world.rank, run.world.size)
        here = Path(str(self._series.folder)) / f"checkpoint_{number}"

        def is_due() -> bool:  # and its files can be seen where they are to be sent from
            mine = [name for name in loaded.files if _sender(name, run.world.size) == disks.rank]
            return plan.is_idle and number >= plan.due and all((here / name).exists() for name in mine)

        control = run.collectives("control")
        if self._series.copies and all(gather_from_all_ranks(control, "load_state: copy", is_due)):
            members = {key: value for key, value in loaded.members.items() if key not in _OF_THE_FILE}
            self._start(members, number, None, disks, Votes.of(run))

    def _start(
        self, source: Source, last: int | None, save: PendingSave | None, disks: Disks, votes: Votes
    ) -> None:
        """Let a thread make a copy, once its save is committed.

        last: number of the last checkpoint whose copy is due, unless the save fails.
        """
        self._forget_error()
        turn, before = threading.Lock(), self._last
        arguments = source, before, save, disks, votes.under(f"copy/{source['save_id']}")
        work = partial(do_once, turn, partial(self._run, *arguments))
        try:
            self._last = last
            self._series.hold({each["iteration"] for each in (self._owed, source) if each is not None})
            self._making = source
            self._done = threading.Event()
            self._sending = Sending(self._done, votes.patience)
            # Daemon thread: the run's atexit handler waits for it.
            threading.Thread(target=work, name="copy", daemon=True).start()
        except BaseException:  # Ctrl-C, or a lack of threads
            do_once(turn, partial(self._undo, before))
            raise

    def _run(
        self, source: Source, before: int | None, save: PendingSave | None, disks: Disks, votes: Votes
    ) -> None:
        try:
            if save is not None:
                save.join()
                if save.has_failed:
                    self._last = before
                    return
            self._owed = source
            self._copy(source, disks, votes)
            self._owed = None
        except Exception as error:  # whatever it is, `wait` raises it
            self._error = error
            unreported[f"copy of {source['save_id']}"] = os.getpid(), str(error)
            logger.warning("%s\nthe next save tries again", error)
        finally:
            self._end()

    def _undo(self, before: int | None) -> None:
        """Let the copy be due as before."""
        self._last = before
        self._end()

    def _end(self) -> None:
        self._series.hold(set() if self._owed is None else {self._owed["iteration"]})
        self._done.set()

    def _copy(self, source: Source, disks: Disks, votes: Votes) -> None:
        """Make a copy. Raises CheckpointError."""
        store, name = self._series.copies, f"checkpoint_{source['iteration']}"
        assert store is not None
        path, local = store.folder / name, Path(str(self._series.folder)) / name
        assert isinstance(path, StoredPath)
        rank, ranks = disks.rank, len(disks.of_rank)
        target = CopyTarget(store, path, source["save_id"], source["iteration"], True, disks, 0, local, votes)
        nothing = Share(rank, b"", (), 0, b"", b"", None)
        copy = PendingSave(target, None, nothing, ranks, source, votes, "copy")
        copy.run()
        if rank == 0:
            with suppress(RuntimeError):  # the process that serves the votes is gone, and with it the vote
                votes.delete("begin")
        copy.wait()

    def join(self, patience: float | None = None) -> bool:
        """Return True once no copy is being made.

        False after `patience` seconds. Unset: after `Votes.patience`, for a store that hangs is not told
        from a slow one.
        """
        if self._done.is_set() or self._making is None or self._sending is None:
            return True
        store = self._series.run.config.project.store
        with show_progress(f"copying checkpoint_{self._making['iteration']} to {store}"):
            return self._sending.join(patience)

    def wait_quietly(self) -> bool:
        """Return as `join` without `patience`, and log that it takes too long."""
        if not (is_over := self.join()):
            logger.warning("%s", self._not_over())
        return is_over

    def wait_together(self, operation: str, ranks: int) -> bool:
        """Return True if `wait_quietly` does so on all ranks.

        Collective. They go on together: one may give up long before another, whose next collective would
        end in vain.
        """
        if ranks == 1:  # of any number, where one saves alone
            return self.wait_quietly()
        run = self._series.run
        wait = work_together(run, operation)(self.wait_quietly)
        return all(gather_from_all_ranks(run.collectives("control"), f"{operation}: wait for the copy", wait))

    def wait(self, patience: float | None = None) -> None:
        """Return once no copy is being made.

        Raises:
            CheckpointError: the last one failed, or is not over after `patience` seconds, as `join` waits.
        """
        if not self.join(patience):
            raise self._not_over(patience)
        if (error := self._forget_error()) is not None:
            raise error

    def _not_over(self, patience: float | None = None) -> CheckpointError:
        said = self._sending.not_over(patience) if self._sending else ""
        run, number = self._series.run, self._making["iteration"] if self._making else -1
        local, store = Path(str(self._series.folder)) / f"checkpoint_{number}", run.config.project.store
        return CheckpointError(
            f"the copy of checkpoint_{number} to {store} {said}\n"
            f"{local} is whole; look after the store, and the start that loads this checkpoint copies it",
            path=str(local),
        )

    def _forget_error(self) -> Exception | None:
        error, self._error = self._error, None
        if error is not None and self._owed is not None:
            unreported.pop(f"copy of {self._owed['save_id']}", None)
        return error


def _all_together(rank: int, ranks: int) -> Disks:
    """Return a rank's part of a copy: the store is one disk for all."""
    return Disks(rank, [0] * ranks)


def _sender(name: str, ranks: int) -> int:
    """Return the rank that sends a file.

    Rank 0 sends what no rank of this copy wrote.
    """
    number = name.removeprefix("rank-").partition(".")[0]
    return int(number) if number.isdecimal() and int(number) < ranks else 0
