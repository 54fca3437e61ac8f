"""Messages between ranks through the store, from any thread: no collective."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store, default_pg_timeout

from accel_core.checkpoint.files import as_json

if TYPE_CHECKING:
    from accel_core.contract.run import Run

__all__ = ["Message", "Votes"]

POLL_SECONDS: Final = 0.05
Message = Mapping[str, Any]


@frozen
class Votes:
    """Messages of this rank's process to the others, and theirs, by key.

    store: a client of its own, since one that waits blocks all that share it.
    timeout: seconds to wait for another rank.
    """

    store: Store
    timeout: float
    prefix: str = ""

    @classmethod
    def of(cls, run: Run, *, alone: bool = False) -> Votes:
        """Votes of the run's ranks, or of this rank alone."""
        timeout = run.config.process_group.timeout or default_pg_timeout
        store: Any = run.world.store  # torch's stub lacks `clone`
        return cls(HashStore() if store is None or alone else store.clone(), timeout.total_seconds())

    def under(self, prefix: str) -> Votes:
        """Return the same, with keys of their own."""
        return evolve(self, prefix=prefix)

    def publish(self, key: str, message: Message) -> None:
        """Let other ranks read the message."""
        self.store.set(f"{self.prefix}/{key}", as_json(message).decode())

    def has(self, key: str) -> bool:
        """Return True once the message is there."""
        return self.store.check([f"{self.prefix}/{key}"])

    def read(self, key: str) -> Any:
        """Return the message, which is there."""
        return json.loads(self.store.get(f"{self.prefix}/{key}"))

    def poll(self, key: str, deadline: float, *, unless: str | None = None) -> Message | None:
        """Return the message, once it is there; else None.

        Returns after the deadline, or once there is a message under `unless`.
        """
        pause = 0.0005
        # Asked again and again: a thread that waits inside the store cannot be ended with the process.
        while not self.has(key):
            if time.monotonic() > deadline or (unless and self.has(unless)):
                return None
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        message: Message = self.read(key)
        return message

    def delete(self, *keys: str) -> None:
        """Remove messages that all have read."""
        for key in keys:
            self.store.delete_key(f"{self.prefix}/{key}")

    def failures(self, messages: Iterable[tuple[int, Message | None]]) -> list[str]:
        """Return the errors that these ranks sent; None for a rank that sent none."""
        silent = {"error": f"no vote within {self.timeout:g} s; it died or hangs"}
        said = [(rank, (silent if message is None else message).get("error")) for rank, message in messages]
        return [f"rank {rank}: {error}" for rank, error in said if error is not None]
