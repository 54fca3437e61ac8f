"""The ranks that save or load together: a step of all of them, their messages, and who acts for a disk."""

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
"""Times process_group.timeout that what is at work is waited for."""
BEATS: Final = 4
"""Times per timeout that a rank at work says so."""


def first_here(comm: Comm, place: Storage) -> bool:
    """Return True for the rank that begins, commits and removes for all that see the place."""
    return comm.rank in firsts(comm, place)


def firsts(comm: Comm, place: Storage) -> list[int]:
    """Return the first rank of each disk; rank 0 of all is the first of them."""
    return [0] if place.shared else sorted(comm.nodes.index(node) for node in set(comm.nodes))


def sharers(comm: Comm, place: Storage) -> list[int]:
    """Return the ranks that see the same files as this one."""
    everyone = range(len(comm.nodes))
    return [rank for rank in everyone if place.shared or comm.nodes[rank] == comm.nodes[comm.rank]]


def agree(gather: Callable[[Any], Sequence[Any]], step: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank; return each rank's result, in rank order. Collective.

    Args:
        gather: returns the objects that all ranks pass, in rank order.
        step: in words; must be the same on all ranks.
        action: what this rank does.

    Raises:
        CheckpointError: `action` failed on some rank; the message has each rank's failure. A failure that all
            ranks have alike is raised as it is; otherwise the error has the most special class among them.
        CollectiveError: ranks make different steps.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as raised:  # whatever it is, the other ranks are waiting for this one's word
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
        error = None  # its traceback has this frame: a cycle would keep what was read until it is collected
    return list(results)


def _refuse_difference(calls: Sequence[str]) -> NoReturn:
    listed = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(calls))
    message = f"{calls[0]}: ranks make different calls\n{listed}\ncall it on all ranks alike"
    raise CollectiveError(message, operation=calls[0], found=calls)


@frozen
class StoreMailbox:
    """See `Mailbox` in `accel_core.storage.protocols`.

    store: the one of all runs of the process: no request waits for a key.
    """

    store: Store
    rank: int
    timeout: float
    prefix: str = ""

    def under(self, prefix: str) -> StoreMailbox:
        """Return the same, with keys of their own."""
        return evolve(self, prefix=prefix)

    def put(self, key: str, message: Message) -> None:
        """Let other ranks read the message."""
        self.store.set(f"{self.prefix}/{key}", json.dumps(message, separators=(",", ":"), allow_nan=False))

    def has(self, key: str) -> bool:
        """Return True once the message is there."""
        return self.store.check([f"{self.prefix}/{key}"])

    def read(self, key: str) -> Any:
        """Return the message, which is there."""
        return json.loads(self.store.get(f"{self.prefix}/{key}"))

    def count(self, key: str) -> int:
        """Return how often ranks have called this with the key, this call included."""
        return self.store.add(f"{self.prefix}/{key}", 1)

    def delete(self, *keys: str) -> None:
        """Remove messages that all have read."""
        for key in keys:
            self.store.delete_key(f"{self.prefix}/{key}")

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Say again and again that this rank is at work, so that others go on waiting.

        For ten times the timeout at most: a disk that hangs cannot be told from one that is slow.
        """
        ended = threading.Event()

        def say() -> None:
            with suppress(RuntimeError):  # the process that serves the store has ended: no rank asks
                for beat in range(TIMEOUTS * BEATS):
                    self.put(f"alive-{self.rank}", {"beat": beat})
                    if ended.wait(self.timeout / BEATS):
                        return

        try:
            with suppress(
                RuntimeError
            ):  # no thread can be had: this rank is waited for, but no longer than that
                threading.Thread(target=say, name="alive", daemon=True).start()
            yield
        finally:
            ended.set()

    def wait(self, senders: Mapping[int, str], timeout: float) -> dict[int, Message | None]:
        """Return what these ranks sent under their keys; None for one that is gone.

        Until the timeout, and then as long as they are `alive`. One request asks whether all have sent, and
        one reads, however many they are. Many that are gone cost no more time than one.
        """
        deadline, pause = time.monotonic() + timeout, 0.0005
        keys = {rank: f"{self.prefix}/{key}" for rank, key in senders.items()}
        beats: dict[int, Any] = {}
        gone: set[int] = set()
        # Asked again and again: a thread that waits inside the store cannot be ended with the process.
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
        """Return what the rank last said of its being at work, if it did."""
        return self.read(f"alive-{rank}") if self.has(f"alive-{rank}") else None


class Alone:
    """A process that saves or loads by itself."""

    rank = 0
    nodes: Sequence[int] = (0,)

    def together(self, step: str, action: Callable[[], T]) -> Sequence[T]:
        """Run the action."""
        del step
        return [action()]

    def mailbox(self, key: str) -> Mailbox:
        """Return one that only this process reads."""
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
