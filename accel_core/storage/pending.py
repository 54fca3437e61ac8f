"""One save from its snapshot to its commit, by files and messages, in any thread.

    rank 0 leads                                    each other rank follows
    writes its files                                writes its files
    puts vote-0                                     puts vote-R: records of the files, or an error
    waits for vote-0 ... vote-N               <-
    if all have written: commits                    [nodes with disks of their own: the first rank of each
    [tells them the manifest's members        ->    commits, and puts commit-R
     and waits for commit-R]                  <-    ]
    puts the verdict: an error, or none       ->    waits for the verdict
    waits for heard-1 ... heard-N             <-    puts heard-R
    deletes all of these messages

No collective is used: a dead rank costs a timeout and is named in the error; a rank that writes for longer
than the timeout reports that it is alive. A rank that gets no verdict reports a failure. Afterwards the first
rank of each disk removes the checkpoints that the new checkpoint replaces, or the files of the failed save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol

from attrs import asdict, define, field

from accel_core.errors import CheckpointError
from accel_core.storage.commit import commit, discard, prune
from accel_core.storage.files import FileRecord, Meter, UnreadableError, as_json, write_file
from accel_core.storage.ranks import first_here, firsts

if TYPE_CHECKING:
    from accel_core.storage.layout import Layout
    from accel_core.storage.protocols import Comm, Mailbox, Message, Storage

HEARD_SECONDS: Final = 10.0
"""Seconds that rank 0 waits until the other ranks have read the verdict."""
LOOK_SECONDS: Final = 0.5
"""Seconds between two checks of a wait; Ctrl-C takes effect at a check."""
SAID_RANKS: Final = 10
SAID_BYTES: Final = 500
"""Largest length of a rank's error in its vote: a vote stays below 1 KiB."""


class Part(Protocol):
    """The files that a rank writes."""

    meter: Meter
    """Counts the bytes written."""

    @property
    def size(self) -> int:
        """Bytes of the files, for the progress message."""

    def write(self, home: Storage) -> dict[str, FileRecord]:
        """Write the files durably; return name -> record."""


@define(eq=False)
class Share:
    """The files of one rank, as bytes and buffers: writing runs no loop over leaves."""

    rank: int
    layout: Layout
    body: Iterable[memoryview]
    """Body of the data file; each part is valid until the next part is requested."""
    own: bytes
    """JSON of this rank's own state."""
    state: bytes | None
    """JSON of the state that all ranks share; None if another rank writes it."""
    meter: Meter = field(factory=Meter)

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return self.layout.size

    def write(self, home: Storage) -> dict[str, FileRecord]:
        """Write the files durably; return name -> record."""
        data, index = f"rank-{self.rank:05d}.safetensors", f"rank-{self.rank:05d}.json"
        with home.writer(data) as file:
            record, blocks = write_file(file, chain([self.layout.head], self.body), self.meter)
        text = [b'{"rank":%d,"state":' % self.rank, self.own, b',"blocks":', as_json(blocks)]
        parts = {
            index: [*text, b",", self.layout.index, b"}"],
            **({} if self.state is None else {"state.json": [self.state]}),
        }
        records = {data: record}
        for name, content in parts.items():
            with home.writer(name) as file:
                records[name], _ = write_file(file, content)
        return records


@define(eq=False)
class Pending:
    """A save in progress: `run` writes and commits it, in any thread; `wait` waits until it is over."""

    place: Storage
    """Folder of the checkpoint."""
    save_id: str
    number: int
    """Number of the commit."""
    parts: Sequence[Part]
    """The files that this rank writes."""
    members: Mapping[str, Any]
    """Members of the manifest without its files; used on rank 0 only."""
    claim: ExitStack
    """Claim of the save's folder; `run` releases the claim."""
    comm: Comm
    mail: Mailbox
    committed: Callable[[], None]
    """Called on the first rank of each disk after the commit."""
    what: str = "save"
    """Name of the operation in error messages."""
    _failure: str | None = field(default="it has not run", init=False)
    _cause: BaseException | None = field(default=None, init=False)
    """The exception that this rank raised."""
    _may_come: bool = field(default=False, init=False)
    """True if a request without an answer may still create the manifest.

    The files then stay: the next save creates or finds the manifest with this number, and removes the rest.
    """
    _is_given_up: bool = field(default=False, init=False)
    """True if `wait` has timed out: the save must not commit any more."""
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """Run the save in a new thread; in this thread if no thread can be started."""
        # Daemon thread: the run's atexit handler waits for it and shows progress.
        self._thread = threading.Thread(target=self.run, name=f"save {self.place.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the process is out of threads
            self._thread = None
            self.run()

    def run(self) -> None:
        """Write, vote, and read the verdict. `wait` raises the failure."""
        rank = self.comm.rank
        try:
            others_wait = len(self.comm.nodes) > 1
            with self.claim, self.mail.alive() if others_wait else nullcontext():
                self.mail.put(f"vote-{rank}", self._attempt(self._write))
                self._failure = self._lead() if rank == 0 else self._follow()
                if first_here(self.comm, self.place):
                    self._clear_up()
        except Exception as error:  # of the mailbox: the process that serves the store has ended
            self._failure = f"rank {rank}: {type(error).__name__}: {error}"
            self._cause = self._cause or error
        if self._cause is not None and not isinstance(self._cause, Exception):
            raise self._cause  # Ctrl-C: the vote has told the other ranks

    @property
    def is_over(self) -> bool:
        """True once the save neither reads the state nor writes files any more."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, patience: float | None = None) -> None:
        """Return once the save is over.

        Raises:
            CheckpointError: the save failed on a rank, or is not over after `patience` seconds.
        """
        deadline = None if patience is None else time.monotonic() + patience
        with nullcontext() if self.is_over else self.shown():
            while self._thread is not None and self._thread.is_alive():
                self._thread.join(LOOK_SECONDS)
                if deadline is not None and time.monotonic() > deadline:
                    self._is_given_up = True
                    self._failure = f"it was not over after {patience:g} s"
                    break
        if self._failure is not None:
            raise CheckpointError(self._message, path=str(self.place)) from self._cause

    def shown(self) -> AbstractContextManager[object]:
        """Show this rank's progress in writing while the context is entered."""
        parts = self.parts
        return self.comm.shown(
            f"writing {self.place.name}",
            lambda: (sum(part.meter.count for part in parts), sum(part.size for part in parts)),
        )

    @property
    def _message(self) -> str:
        return (
            f"the {self.what} to {self.place} failed; a checkpoint that was there is still whole\n"
            f"{self._failure}\nmend that and save again"
        )

    def _attempt(self, action: Callable[[], Message]) -> Message:
        """Return the result of `action`, or its error as a message to the other ranks."""
        try:
            return action()
        except BaseException as error:
            self._cause = error
            return {"error": f"{type(error).__name__}: {error}"[:SAID_BYTES]}

    def _write(self) -> Message:
        home, records = self.place.at(self.save_id), dict[str, FileRecord]()
        try:
            for part in self.parts:
                records |= part.write(home)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.place}/{self.save_id}, made by rank 0, is not visible here\n"
                "give all ranks the same directory, on a disk that all nodes share,"
                " or set project.save_on_each_node"
            ) from error
        return {"files": {name: asdict(record) for name, record in records.items()}}

    def _commit(self, members: Mapping[str, Any]) -> Message:
        """Create the manifest with all its members."""
        if self._is_given_up:
            raise CheckpointError("nobody waits for it any more\nsave again")
        here = {rank for rank, node in enumerate(self.comm.nodes) if node == self.comm.nodes[self.comm.rank]}
        sizes = {
            name: each["size"]
            for name, each in members["files"].items()
            if self.place.shared or _rank_of(name) in {*here, None}
        }
        try:
            commit(self.place, members, self.number, sizes)
        except BaseException as error:
            # A refusal or an errno is an answer; after any other error the request may still run.
            refused = isinstance(error, CheckpointError) and not isinstance(error, UnreadableError)
            self._may_come = not refused and getattr(error, "errno", None) is None
            raise
        return {}

    def _clear_up(self) -> None:
        if self._failure is None:
            prune(self.place, self.number)
            self.committed()
        elif not self._may_come:
            discard(self.place, self.save_id)

    # -- rank 0 --------------------------------------------------------------------------------------------

    def _lead(self) -> str | None:
        """Read the votes of all ranks, then commit. Returns the reason of a failure, or None."""
        mail, ranks = self.mail, range(len(self.comm.nodes))
        heard = mail.wait({rank: f"vote-{rank}" for rank in ranks}, mail.timeout)
        failures = self._failures(heard)
        others = firsts(self.comm, self.place)[1:]
        files = {
            name: each for vote in heard.values() if vote for name, each in vote.get("files", {}).items()
        }
        members = {**self.members, "files": dict(sorted(files.items()))}
        if others:
            mail.put("commit", {"members": None if failures else members})
        if not failures:
            answers: dict[int, Message | None] = {0: self._attempt(lambda: self._commit(members))}
            answers |= mail.wait({rank: f"commit-{rank}" for rank in others}, mail.timeout)
            failures = self._failures(answers)
        failure = "\n".join(failures[:SAID_RANKS]) or None
        mail.put("verdict", {"failure": failure})
        # Rank 0 often serves the store: it must not exit before all ranks have read the verdict.
        alive = [rank for rank, vote in heard.items() if vote is not None and rank]
        left = mail.wait({rank: f"heard-{rank}" for rank in alive}, HEARD_SECONDS)
        if None not in [*heard.values(), *left.values()]:  # else a rank may still read them
            words = ("vote", "heard", "alive", *(["commit"] if others else []))
            mail.delete("verdict", "commit", *(f"{word}-{rank}" for word in words for rank in ranks))
        return failure

    def _failures(self, heard: Mapping[int, Message | None]) -> list[str]:
        silent = {"error": f"no vote within {self.mail.timeout:g} s; it died or hangs"}
        said = {rank: (silent if each is None else each).get("error") for rank, each in heard.items()}
        return [f"rank {rank}: {error}" for rank, error in said.items() if error is not None]

    # -- each other rank -----------------------------------------------------------------------------------

    def _follow(self) -> str | None:
        """Read the verdict of rank 0; the first rank of a disk commits there. Returns as `_lead` does."""
        mail, rank = self.mail, self.comm.rank
        # Twice the timeout: rank 0 may write for as long as this rank waits, and then wait for other ranks.
        patience = 2 * mail.timeout
        if first_here(self.comm, self.place):  # true only on disks that rank 0 does not see
            asked = mail.wait({0: "commit"}, patience)[0]
            if asked is not None and asked["members"] is not None:
                mail.put(f"commit-{rank}", self._attempt(lambda: self._commit(asked["members"])))
        verdict = mail.wait({0: "verdict"}, patience)[0]
        if verdict is None:
            self._may_come = True  # rank 0 may have committed
            return f"rank 0: no verdict within {patience:g} s; it died or hangs"
        failure: str | None = verdict["failure"]
        mail.put(f"heard-{rank}", {})
        return failure


def _rank_of(name: str) -> int | None:
    """Return the rank that wrote a file; None for `state.json`, which every disk has."""
    number = name.removeprefix("rank-").partition(".")[0]
    return int(number) if number.isdecimal() else None
