"""The ranks that save or load together: a joint step, messages, and the first rank of each disk."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from attrs import evolve, frozen

from accel_core.errors import CheckpointError, CollectiveError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_core.storage.protocols import Comm, Mailbox, Measure, Message, Storage

T = TypeVar("T")
POLL_SECONDS: Final = 0.05
TIMEOUTS: Final = 10
"""Longest time that a rank reports that it is alive, in multiples of the timeout."""
BEATS: Final = 4
"""Number of times per timeout that a rank reports that it is alive."""


def first_here(comm: Comm, place: Storage) -> bool:
    """Return True on the first rank of each disk, which begins, commits and removes saves there."""
    return comm.rank in firsts(comm, place)


def firsts(comm: Comm, place: Storage) -> list[int]:
    """Return the first rank of each disk, in rank order: rank 0 is always first."""
    return [0] if place.shared else sorted(comm.nodes.index(node) for node in set(comm.nodes))


def sharers(comm: Comm, place: Storage) -> list[int]:
    """Return the ranks that see the same files as this rank, in rank order."""
    everyone = range(len(comm.nodes))
    return [rank for rank in everyone if place.shared or comm.nodes[rank] == comm.nodes[comm.rank]]


def agree(gather: Callable[[Any], Sequence[Any]], step: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank; return each rank's result, in rank order. Collective.

    Args:
        gather: returns the objects that all ranks pass, in rank order.
        step: name of the step, which must be the same on all ranks.
        action: function that this rank runs.

    Raises:
        CheckpointError: `action` failed on a rank; the message has each rank's failure. If all ranks fail
            alike, each rank raises its own error; otherwise the error has the most derived class among them.
        CollectiveError: ranks run different steps.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as raised:  # any error: the other ranks wait in `gather`
        error = raised
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    failure = None if error is None else (kind, f"{type(error).__name__}: {error}")
    steps, failures, results = zip(*gather((step, failure, result)), strict=True)
    try:
        if len(set(steps)) > 1:
            _refuse_difference(steps)
        if error is not None and len(set(failures)) == 1:
            raise error
        failed = {rank: each for rank, each in enumerate(failures) if each is not None}
        if failed:
            kind = max((kind for kind, _ in failed.values()), key=lambda kind: len(kind.__mro__))
            text = "\n".join(f"rank {rank}: {said}" for rank, (_, said) in failed.items())
            raise kind(text, path=getattr(error, "path", None)) from error
    finally:
        error = None  # break the cycle error -> traceback -> frame, which keeps the result alive
    return list(results)


def _refuse_difference(calls: Sequence[str]) -> NoReturn:
    listed = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(calls))
    message = f"{calls[0]}: ranks make different calls\n{listed}\ncall it on all ranks alike"
    raise CollectiveError(message, operation=calls[0], found=calls)


@frozen
class StoreMailbox:
    """A mailbox on a torch store: see `Mailbox` in `accel_core.storage.protocols`."""

    store: Store
    """Store that the whole process shares, so that no request may block until a key is set."""
    rank: int
    timeout: float
    prefix: str = ""

    def under(self, prefix: str) -> StoreMailbox:
        """Return a mailbox on the same store with another prefix."""
        return evolve(self, prefix=prefix)

    def put(self, key: str, message: Message) -> None:
        """Send a message that all other ranks can read."""
        self.store.set(f"{self.prefix}/{key}", json.dumps(message, separators=(",", ":"), allow_nan=False))

    def has(self, key: str) -> bool:
        """Return True once the message has arrived."""
        return self.store.check([f"{self.prefix}/{key}"])

    def read(self, key: str) -> Any:
        """Return the message, which must have arrived."""
        return json.loads(self.store.get(f"{self.prefix}/{key}"))

    def count(self, key: str) -> int:
        """Return the number of calls of all ranks with this key so far, including this call."""
        return self.store.add(f"{self.prefix}/{key}", 1)

    def delete(self, *keys: str) -> None:
        """Remove messages that all ranks have read."""
        for key in keys:
            self.store.delete_key(f"{self.prefix}/{key}")

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Report periodically that this rank is alive, so that other ranks continue to wait.

        The reports end after `TIMEOUTS` timeouts: a hanging disk cannot be distinguished from a slow disk.
        """
        ended = threading.Event()

        def say() -> None:
            with suppress(RuntimeError):  # the process that serves the store has ended
                for beat in range(TIMEOUTS * BEATS):
                    self.put(f"alive-{self.rank}", {"beat": beat})
                    if ended.wait(self.timeout / BEATS):
                        return

        try:
            with suppress(RuntimeError):  # out of threads: others wait one timeout only
                threading.Thread(target=say, name="alive", daemon=True).start()
            yield
        finally:
            ended.set()

    def wait(self, senders: Mapping[int, str], timeout: float) -> dict[int, Message | None]:
        """Return rank -> its message under the given key; None for ranks that are gone.

        The call waits until the timeout, and then as long as the silent ranks are `alive`. One request checks
        for all messages, and one request reads them. Several dead ranks cost no more time than a single one.
        """
        deadline, pause = time.monotonic() + timeout, 0.0005
        keys = {rank: f"{self.prefix}/{key}" for rank, key in senders.items()}
        beats: dict[int, Any] = {}
        gone: set[int] = set()
        # Poll: a thread that blocks inside the store would keep the process from ending.
        while not self.store.check([key for rank, key in keys.items() if rank not in gone]):
            if time.monotonic() > deadline:
                silent = [rank for rank, key in senders.items() if not self.has(key)]
                before, beats = beats, {rank: self._beat(rank) for rank in silent}
                gone = {rank for rank, beat in beats.items() if beat == before.get(rank)}
                deadline = time.monotonic() + 2 * self.timeout / BEATS
            else:
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS)
        heard = [rank for rank in senders if rank not in gone or self.has(senders[rank])]
        messages = self.store.multi_get([keys[rank] for rank in heard]) if heard else []
        return dict.fromkeys(senders) | dict(zip(heard, map(json.loads, messages), strict=True))

    def _beat(self, rank: int) -> Any:
        """Return the last report of the rank that it is alive, or None."""
        return self.read(f"alive-{rank}") if self.has(f"alive-{rank}") else None


class Alone:
    """A single process that saves or loads: see `Comm` in `accel_core.storage.protocols`."""

    rank = 0
    nodes: Sequence[int] = (0,)

    def together(self, step: str, action: Callable[[], T]) -> Sequence[T]:
        """Run the action; return its result in a list."""
        del step
        return [action()]

    def mailbox(self, key: str) -> Mailbox:
        """Return a mailbox inside this process."""
        del key
        return _LocalMailbox()

    def shown(self, text: str, measure: Measure | None = None) -> AbstractContextManager[object]:
        """Show nothing."""
        del text, measure
        return nullcontext()


class _LocalMailbox:
    timeout = 0.0

    def __init__(self) -> None:
        self._sent: dict[str, Message] = {}

    def put(self, key: str, message: Message) -> None:
        self._sent[key] = message

    def wait(self, senders: Mapping[int, str], timeout: float) -> dict[int, Message | None]:
        del timeout
        return {rank: self._sent.get(key) for rank, key in senders.items()}

    def alive(self) -> AbstractContextManager[object]:
        return nullcontext()

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._sent.pop(key, None)
