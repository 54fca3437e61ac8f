"""Messages between ranks through the store, from any thread: no collective."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_core.storage.protocols import Message

POLL_SECONDS: Final = 0.05
TIMEOUTS: Final = 10
"""Times process_group.timeout that what is at work is waited for."""
BEATS: Final = 4
"""Times per timeout that a rank at work says so."""


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
