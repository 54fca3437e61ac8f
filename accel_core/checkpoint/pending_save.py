"""One save from its snapshot to its commit: nothing but files and votes, so any thread can do it.

Each rank writes and syncs its files, and says so in the store, or why not. Rank 0 hears all, writes
the manifest, publishes the checkpoint, and tells the others how it went. No collective: a dead rank
costs a timeout and has a name.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict, define, field

from accel_core.checkpoint import unheard
from accel_core.checkpoint.files import (
    FileRecord,
    as_json,
    is_ours,
    manifest_of,
    sync_folder,
    write_file,
    write_manifest,
)
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_core.checkpoint.target import Place

__all__ = ["Flight", "Share"]

POLL_SECONDS: Final = 0.05
HEARD_SECONDS: Final = 10.0
"""How long rank 0 waits for the others to hear how it went."""
PROGRESS_SECONDS: Final = 0.5
SAID_RANKS: Final = 10
SAID_BYTES: Final = 500
"""Of a rank's error in its vote: a vote stays below 1 KiB."""


@define(eq=False)
class Share:
    """What a rank writes: bytes and buffers only, so that writing runs no loop over leaves.

    head, body: of the data file, `size` bytes; each part of the body is valid until the next one.
    own: JSON of this rank's state. index: JSON of where the tensors are.
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
        written, _ = write_file(folder / index, [*text, b',"tensors":', self.index, b"}"])
        records = {self.data: record, index: written}
        if self.state is not None:
            records["state.json"], _ = write_file(folder / "state.json", [self.state])
        sync_folder(folder)
        return records


@define(eq=False)
class Flight:
    """A save that is under way. `run` does it, here or in a thread of its own; `settle` waits.

    manifest: what it says but for the files. store: where the ranks vote; nobody else may wait on
    this client, since one that waits blocks all that share it.
    """

    place: Place
    step: int | None
    share: Share
    ranks: int
    manifest: Mapping[str, Any]
    store: Store
    timeout: float
    """Seconds to wait for the votes of other ranks, after the own one."""
    _failure: str | None = field(default="it has not run", init=False)
    _cause: BaseException | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _done: threading.Event = field(factory=threading.Event, init=False)

    def start(self) -> None:
        """Let a thread do it."""
        # A daemon: at exit the run waits for it, and shows progress, before the interpreter would.
        self._thread = threading.Thread(target=self.run, name=f"save {self.place.target.name}", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Write, vote, and hear the verdict. A failure is kept for `settle`."""
        try:
            self._tell(f"vote-{self.share.rank}", self._vote(self._write))
            self._failure = self._lead() if self.share.rank == 0 else self._follow()
        except Exception as error:  # the store's: the process that serves it is gone
            self._failure = f"rank {self.share.rank}: {type(error).__name__}: {error}"
            self._cause = self._cause or error
        finally:
            self.place.finish()
            if self._thread is not None and self._failure is not None:
                unheard[self.place.save_id] = os.getpid(), self._said
            self._done.set()
        if self._cause is not None and not isinstance(self._cause, Exception):
            raise self._cause  # Ctrl-C: the others know

    def _write(self) -> dict[str, Any]:
        records = self.share.write(self.place.folder)
        return {"files": {name: asdict(record) for name, record in records.items()}}

    @property
    def over(self) -> bool:
        """Whether nothing of it is read or written any more."""
        # A join that Ctrl-C ends may count a running thread as stopped; nor can it be joined again then.
        return self._thread is None or self._done.is_set()

    @property
    def _said(self) -> str:
        return (
            f"the save to {self.place.target} failed; a checkpoint that was there is still whole\n"
            f"{self._failure}\nmend that and save again"
        )

    def settle(self, patience: float | None = None) -> None:
        """Wait until it is over.

        Raises:
            CheckpointError: it failed on some rank, or is not over after `patience` seconds.
        """
        deadline = None if patience is None else time.monotonic() + patience
        while not self.over:
            if deadline is not None and time.monotonic() > deadline:
                self._failure = f"it was not over after {patience:g} s"
                break
            self._done.wait(PROGRESS_SECONDS)
            self._show_progress()
        unheard.pop(self.place.save_id, None)
        if self._failure is not None:
            raise CheckpointError(self._said, path=str(self.place.target)) from self._cause

    def _follow(self) -> str | None:
        # Twice: rank 0 may have written as long as this rank waits, and then waited for others.
        deadline = time.monotonic() + 2 * self.timeout
        if self.place.first:  # of a disk that rank 0 does not see
            self._attend("manifest", deadline, lambda text: write_manifest(self.place.folder, text.encode()))
            self._attend("publish", deadline, lambda _: self.place.publish())
        verdict = self._hear("verdict", deadline)
        if verdict is None:
            return f"rank 0: no verdict within {2 * self.timeout:g} s; it died or hangs"
        failure: str | None = verdict["failure"]
        self._tell(f"heard-{self.share.rank}", {})
        if self.place.first and failure is None:
            self.place.settle()
        elif self.place.first and not is_ours(self.place.folder):
            self.place.discard()
        return failure

    def _attend(self, what: str, deadline: float, action: Callable[[str], object]) -> None:
        """Do on this disk what rank 0 has done on its own, and say how it went; nothing, if it gives up."""
        said = self._hear(what, deadline, unless="verdict")
        if said is not None:
            self._tell(
                f"{what}-{self.share.rank}", self._vote(lambda: {"done": action(said["text"]) is None})
            )

    def _vote(self, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return action()
        except BaseException as error:  # whatever it is, the other ranks are waiting for our word
            self._cause = error
            return {"error": f"{type(error).__name__}: {error}"[:SAID_BYTES]}

    # -- rank 0 ----------------------------------------------------------------------------------

    def _lead(self) -> str | None:
        """Hear all ranks, then publish the checkpoint or remove it; why it failed, if it did."""
        deadline = time.monotonic() + self.timeout
        votes = [self._hear(f"vote-{rank}", deadline) for rank in range(self.ranks)]
        failure = self._decide(votes)
        self._tell("verdict", {"failure": failure})
        # Rank 0 often serves the store: it must not be gone before all have heard.
        deadline = time.monotonic() + HEARD_SECONDS
        for rank, vote in enumerate(votes):
            if vote is not None and (rank == 0 or self._hear(f"heard-{rank}", deadline) is not None):
                self._forget(f"vote-{rank}", f"heard-{rank}")
        if None not in votes:
            self._forget("verdict")
        return failure

    def _decide(self, votes: Sequence[dict[str, Any] | None]) -> str | None:
        failures = self._failures(dict(enumerate(votes)))
        if not failures:
            files = {name: record for vote in votes if vote for name, record in vote["files"].items()}
            failures = self._publish(dict(sorted(files.items())))
        # A rename that the disk may have forgotten could have put the old checkpoint there.
        several = len(self.place.firsts) > 1
        renaming = (several or isinstance(self._cause, OSError)) and is_ours(self.place.folder)
        if failures and not renaming:
            self.place.discard()
        return "\n".join(failures[:SAID_RANKS]) or None

    def _publish(self, files: Mapping[str, Any]) -> list[str]:
        try:
            manifest = manifest_of({**self.manifest, "files": files})
            write_manifest(self.place.folder, manifest)
            failures = self._on_other_disks("manifest", manifest.decode())
            if not failures:
                self.place.publish()
                failures = self._on_other_disks("publish")
            if not failures:
                self.place.settle()
        except Exception as error:  # whatever it is, the other ranks are waiting for our word
            self._cause = error
            return [f"rank 0: {type(error).__name__}: {error}"]
        return failures

    def _on_other_disks(self, what: str, text: str = "") -> list[str]:
        """Have it done by the first rank of each other disk; what went wrong."""
        others = self.place.firsts[1:]
        if not others:
            return []
        self._tell(what, {"text": text})
        deadline = time.monotonic() + self.timeout
        votes = {rank: self._hear(f"{what}-{rank}", deadline) for rank in others}
        self._forget(what, *(f"{what}-{rank}" for rank in others))
        return self._failures(votes)

    def _failures(self, votes: Mapping[int, dict[str, Any] | None]) -> list[str]:
        silent = {"error": f"no vote within {self.timeout:g} s; it died or hangs"}
        said = [(rank, (vote or silent).get("error")) for rank, vote in votes.items()]
        return [f"rank {rank}: {error}" for rank, error in said if error is not None]

    # -- votes -----------------------------------------------------------------------------------

    def _key(self, what: str) -> str:
        return f"save/{self.place.save_id}/{what}"

    def _tell(self, what: str, said: Mapping[str, Any]) -> None:
        self.store.set(self._key(what), as_json(said).decode())

    def _forget(self, *said: str) -> None:
        for what in said:
            self.store.delete_key(self._key(what))

    def _hear(self, what: str, deadline: float, *, unless: str | None = None) -> dict[str, Any] | None:
        pause = 0.0005
        # Asked again and again: a thread that waits inside the store cannot be ended with the process.
        while not self.store.check([self._key(what)]):
            if time.monotonic() > deadline or (unless and self.store.check([self._key(unless)])):
                return None
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        said: dict[str, Any] = json.loads(self.store.get(self._key(what)))
        return said

    # -- progress --------------------------------------------------------------------------------

    def _show_progress(self) -> None:
        if self.share.rank or not sys.stderr.isatty():
            return
        try:
            written = (self.place.folder / self.share.data).stat().st_size
        except FileNotFoundError:  # it has its name by now
            written = self.share.size
        line = f"accel: writing {self.place.target.name}: {written >> 20} of {self.share.size >> 20} MiB"
        sys.stderr.write(f"\r{'' if self.over else line:<79}" + ("\r" if self.over else ""))
        sys.stderr.flush()
