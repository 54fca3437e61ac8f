"""One save from its snapshot to its commit, by files and votes, in any thread.

    rank 0 leads                                    each other rank follows
    writes and syncs its files                      writes and syncs its files
    publishes vote-0                                publishes vote-R: records of the files, or an error
    polls vote-0 ... vote-N                   <-
    if all have written: writes the manifest,
    renames the folder (several disks: see `disks`),
    removes what the new checkpoint replaces;
    else: removes the folder
    publishes the verdict: an error, or none  ->    polls the verdict
    polls heard-1 ... heard-N                 <-    publishes heard-R
    deletes all of these messages

No collective: a dead rank costs a timeout and is named. One that writes for longer says so (`alive-R`).
A rank that gets no verdict has failed.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict, define, field

from accel_core.checkpoint import unreported
from accel_core.checkpoint.bound import Bound
from accel_core.checkpoint.disks import answer, ask_other_disks
from accel_core.checkpoint.files import FileRecord, as_json, sync_folder, write_file
from accel_core.checkpoint.manifest import is_ours, manifest_of, write_manifest
from accel_core.checkpoint.sending import Sending, do_once, wait_for
from accel_core.checkpoint.stored import StoredPath
from accel_core.distributed.progress import show_progress
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.stored_target import StoredTarget
    from accel_core.checkpoint.target import SaveTarget
    from accel_core.checkpoint.votes import Message, Votes

HEARD_SECONDS: Final = 10.0
"""Seconds that rank 0 waits for the others to hear the verdict."""
SAID_RANKS: Final = 10
SAID_BYTES: Final = 500
"""Length of a rank's error in its vote: a vote stays below 1 KiB."""


@define(eq=False)
class Share:
    """The files of one rank, as bytes and buffers: writing runs no loop over leaves.

    head, body: of the data file, `size` bytes; each part of the body is valid until the next one.
    own: JSON of this rank's state. index: members of a JSON object, of where the tensors are.
    state: JSON of what all ranks share, for the rank that writes it.
    """

    rank: int
    head: bytes
    body: Iterable[memoryview]
    size: int
    own: bytes
    index: bytes
    state: bytes | None

    @property
    def data(self) -> str:
        """The name of the data file."""
        return f"rank-{self.rank:05d}.safetensors"

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """Write and sync the files; name -> record."""
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}, made by rank 0, is not visible here\n"
                "give all ranks the same directory, on a disk that all nodes share,"
                " or set project.save_on_each_node"
            )
        record, blocks = write_file(folder / self.data, chain([self.head], self.body))
        text = [b'{"rank":%d,"state":' % self.rank, self.own, b',"blocks":', as_json(blocks)]
        index = f"rank-{self.rank:05d}.json"
        written, _ = write_file(folder / index, [*text, b",", self.index, b"}"])
        records = {self.data: record, index: written}
        if self.state is not None:
            records["state.json"], _ = write_file(folder / "state.json", [self.state])
        sync_folder(folder)
        return records


@define(eq=False)
class PendingSave:
    """A save that is under way.

    `run` does it, here or in a thread of its own; `wait` waits for it.

    ranks: how many save together. manifest: what it says but for the files. what: "save" or "copy".
    """

    target: SaveTarget | StoredTarget
    step: int | None
    share: Share
    ranks: int
    manifest: Mapping[str, Any]
    votes: Votes
    what: str = "save"
    _failure: str | None = field(default="it has not run", init=False)
    cause: BaseException | None = field(default=None, init=False)
    """The error of this rank's part."""
    _thread: threading.Thread | None = field(default=None, init=False)
    _turn: threading.Lock = field(factory=threading.Lock, init=False)
    """Taken once: by the thread as it begins, or by a `start` that failed."""
    _done: threading.Event = field(factory=threading.Event, init=False)
    _sending: Sending | None = field(default=None, init=False)
    """In a thread, to a store."""
    _bound: Bound = field(factory=Bound, init=False)
    """Of a thread, which asks no store any more once nobody waits for it."""

    def start(self) -> None:
        """Let a thread do it.

        Where Ctrl-C or a lack of threads prevents that, `wait` raises.
        """
        # Daemon thread: the run's atexit handler waits for it and shows progress.
        work = partial(do_once, self._turn, self._bound.applied()(self.run))
        try:
            self._thread = threading.Thread(target=work, name=f"save {self.target.path.name}", daemon=True)
            if isinstance(self.target.path, StoredPath):
                self._sending = Sending(self._done, self.votes.patience)
            self._thread.start()
        except BaseException:  # a thread that begins a moment later writes nothing
            do_once(self._turn, self._end)
            raise

    def run(self) -> None:
        """Write, vote, and hear the verdict. A failure is kept for `wait`."""
        rank = self.share.rank
        try:
            with self.votes.alive(rank) if self.ranks > 1 else nullcontext():
                self.votes.publish(f"vote-{rank}", self.attempt(self._write))
                self._failure = _lead(self) if rank == 0 else _follow(self)
        except Exception as error:  # the store's: the process that serves it is gone
            self._failure = f"rank {rank}: {type(error).__name__}: {error}"
            self.cause = self.cause or error
        finally:
            self._end()
        if self.cause is not None and not isinstance(self.cause, Exception):
            raise self.cause  # Ctrl-C: the others know

    def _end(self) -> None:
        self.target.end_writing()
        if self._thread is not None and self._failure is not None and not self.is_given_up:
            unreported[self.target.save_id] = os.getpid(), self._message
        self._done.set()

    def attempt(self, action: Callable[..., Message], *arguments: Any) -> Message:
        """Return the result of `action`, or its error, as a message to the other ranks."""
        try:
            return action(*arguments)
        except BaseException as error:
            self.cause = error
            return {"error": f"{type(error).__name__}: {error}"[:SAID_BYTES]}

    def _write(self) -> Message:
        records = self.target.write(self.share.write, self.share.size)
        return {"files": {name: asdict(record) for name, record in records.items()}}

    @property
    def is_over(self) -> bool:
        """True once nothing of it is read or written any more."""
        # A join that Ctrl-C ends may count a running thread as stopped; nor can it be joined again then.
        return self._thread is None or self._done.is_set()

    @property
    def is_given_up(self) -> bool:
        """True once nothing waits for it, and it will not be committed."""
        return self._bound.is_given_up

    @property
    def _message(self) -> str:
        return (
            f"the {self.what} to {self.target.path} failed; a checkpoint that was there is still whole\n"
            f"{self._failure}\nmend that and save again"
        )

    @property
    def has_failed(self) -> bool:
        """True once it is over, without a checkpoint."""
        return self.is_over and self._failure is not None

    def wait(self, patience: float | None = None) -> None:
        """Return once it is over.

        Raises:
            CheckpointError: it failed on some rank, or is not over after `patience` seconds. Unset: a save
                to a store after `Votes.patience`, for a store that hangs is not told from a slow one.
        """
        with nullcontext() if self.is_over else self.shown():
            if not self.join(patience):
                self._failure = f"it was not over after {patience} s"
                if self._sending is not None:
                    self._failure = f"it {self._sending.not_over(patience)}"
                    self._bound.give_up()
        unreported.pop(self.target.save_id, None)
        if self._failure is not None:
            raise CheckpointError(self._message, path=str(self.target.path)) from self.cause

    def join(self, patience: float | None = None) -> bool:
        """Return True once it is over; False after `patience` seconds."""
        if self._sending is not None:
            return self._sending.join(patience)
        deadline = math.inf if patience is None else time.monotonic() + patience
        return self.is_over or wait_for(self._done, deadline)

    def shown(self) -> AbstractContextManager[None]:
        """Show how much of this rank's data is written, while that is waited for."""
        return show_progress(f"writing {self.target.path.name}", self._written)

    def _written(self) -> tuple[int, int]:
        return self.target.written(self.share.data, self.share.size), self.share.size


# -- rank 0 --------------------------------------------------------------------------------------


def _lead(save: PendingSave) -> str | None:
    """Hear all ranks, then publish the checkpoint or remove it.

    Returns why it failed, if it did.
    """
    votes, deadline = save.votes, time.monotonic() + save.votes.timeout
    heard = [*votes.poll_all({rank: f"vote-{rank}" for rank in range(save.ranks)}, deadline).values()]
    failures = votes.failures(enumerate(heard)) or _commit(save, heard)
    # A rename that an error or Ctrl-C met may be done or not, on this disk or another: both folders stay.
    unsure = isinstance(save.cause, OSError) or not isinstance(save.cause, Exception | None)
    unsure = unsure or save.target.disks.are_several
    if failures and not (unsure and is_ours(save.target.folder)):
        save.target.discard()
    failure = "\n".join(failures[:SAID_RANKS]) or None
    votes.publish("verdict", {"failure": failure})
    # Rank 0 often serves the store: it must not be gone before all have heard.
    deadline = time.monotonic() + HEARD_SECONDS
    for rank, vote in enumerate(heard):
        if vote is not None and (rank == 0 or votes.poll(f"heard-{rank}", deadline) is not None):
            votes.delete(f"vote-{rank}", f"heard-{rank}", f"alive-{rank}")
    if None not in heard:
        votes.delete("verdict")
    return failure


def _commit(save: PendingSave, heard: Sequence[Message | None]) -> list[str]:
    """Write the manifest, and give the folder its name, on all disks.

    Returns what went wrong.
    """
    target, others = save.target, save.target.disks.firsts[1:]
    try:
        files = {name: record for vote in heard if vote for name, record in vote["files"].items()}
        content = manifest_of({**save.manifest, "files": dict(sorted(files.items()))})
        write_manifest(target.folder, content)
        failures = ask_other_disks(save.votes, others, "manifest", content.decode())
        if not failures:
            target.publish()
            failures = ask_other_disks(save.votes, others, "publish")
        if not failures:
            target.remove_replaced()
    except BaseException as error:  # of any kind: the other ranks wait for the verdict
        save.cause = error
        return [f"rank 0: {type(error).__name__}: {error}"]
    return failures


# -- each other rank -----------------------------------------------------------------------------


def _follow(save: PendingSave) -> str | None:
    """Hear the verdict from rank 0; the first rank of a disk commits there.

    Returns as `_lead`.
    """
    votes, target, rank = save.votes, save.target, save.share.rank
    # Twice: rank 0 may have written as long as this rank waits, and then waited for others.
    deadline = time.monotonic() + 2 * votes.timeout

    def write(content: str) -> Message:
        write_manifest(target.folder, content.encode())
        return {"done": True}

    def publish(_: str) -> Message:
        target.publish()
        return {"done": True}

    if target.disks.is_first:  # of a disk that rank 0 does not see
        answer(votes, rank, "manifest", deadline, partial(save.attempt, write))
        answer(votes, rank, "publish", deadline, partial(save.attempt, publish))
    verdict = votes.poll("verdict", deadline, rank=0)
    if verdict is None:
        return f"rank 0: no verdict within {2 * votes.timeout:g} s; it died or hangs"
    failure: str | None = verdict["failure"]
    votes.publish(f"heard-{rank}", {})
    if target.disks.is_first and failure is None:
        target.remove_replaced()
    elif target.disks.is_first and not is_ours(target.folder):
        target.discard()
    return failure
