"""Messages between ranks through the store, from any thread: no collective."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attrs import evolve, frozen
from torch._C._distributed_c10d import HashStore

from accel_core.checkpoint.bound import Bound
from accel_core.checkpoint.files import as_json
from accel_core.distributed.watch import timeout_of

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_core.contract.run import Run

POLL_SECONDS: Final = 0.05
TIMEOUTS: Final = 10
"""Times process_group.timeout that what is at work is waited for."""
BEATS: Final = 4
"""Times per timeout that a rank at work says so."""
Message = Mapping[str, Any]
Rank = TypeVar("Rank", int, int | None)
"""None: a sender that does not say that it is at work."""
_works: Final = count()
"""Ranks work in one order, and each work has keys of its own."""


@contextmanager
def work_together(run: Run, what: str, *, alone: bool = False) -> Iterator[None]:
    """Leave each rank's part of a long work once all have done theirs.

    What it asks of stores is waited for as long as this rank is, by the others.

    Collective. Ranks that are gone are not waited for. Those that are done, or have failed, wait outside
    of a collective, which its timeout would end.
    """
    rank, ranks = (0, 1) if alone else (run.world.rank, run.world.size)
    votes = Votes.of(run, alone=alone).under(f"{what}/{'alone' if alone else next(_works)}")
    failure: Exception | None = None
    try:
        with votes.alive(rank), Bound(votes.patience, renewed=ranks == 1).applied():
            yield
    except Exception as error:  # it is told once the others can hear it
        failure = error
    finally:
        votes.publish(f"done-{rank}", {})
    for other in range(ranks):
        if votes.poll(f"done-{other}", time.monotonic() + votes.timeout / 2, rank=other) is None:
            break  # the collective that follows fails in any case
    if failure is not None:
        raise failure


@frozen
class Votes:
    """Messages of this rank's process to the others, and theirs, by key.

    store: a client of its own, since one that waits blocks all that share it.
    timeout: seconds to wait for another rank that does not say that it is at work.
    """

    store: Store
    timeout: float
    prefix: str = ""

    @classmethod
    def of(cls, run: Run, *, alone: bool = False) -> Votes:
        """Votes of the run's ranks, or of this rank alone."""
        store: Any = run.world.store  # torch's stub lacks `clone`
        return cls(HashStore() if store is None or alone else store.clone(), timeout_of(run))

    @property
    def patience(self) -> float:
        """Seconds that what is at work is waited for."""
        return TIMEOUTS * self.timeout

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

    @contextmanager
    def alive(self, rank: int) -> Iterator[None]:
        """Say again and again that this rank is at work, so that others go on waiting.

        For ten times the timeout at most: a disk that hangs cannot be told from one that is slow.
        """
        ended = threading.Event()

        def say() -> None:
            with suppress(RuntimeError):  # the process that serves the store has ended: no rank asks
                for beat in range(TIMEOUTS * BEATS):
                    self.publish(f"alive-{rank}", {"beat": beat})
                    if ended.wait(self.timeout / BEATS):
                        return

        try:
            threading.Thread(target=say, name="alive", daemon=True).start()
            yield
        finally:
            ended.set()

    def poll(
        self, key: str, deadline: float, *, unless: str | None = None, rank: int | None = None
    ) -> Message | None:
        """Return the message, once it is there; else None.

        Returns after the deadline, or once there is a message under `unless`. rank: the sender, which is
        waited for while it is `alive`.
        """
        return self.poll_all({rank: key}, deadline, unless=unless)[rank]

    def poll_all(
        self, keys: Mapping[Rank, str], deadline: float, *, unless: str | None = None
    ) -> dict[Rank, Message | None]:
        """Return what these ranks send under their keys; None for one that is gone.

        Until the deadline, and then as long as they are `alive`. They are watched together, so that many
        that are gone cost no more time than one.
        """
        heard: dict[Rank, Message | None] = {}
        beats: dict[Rank, Any] = {}
        gone: set[Rank] = set()
        for rank, key in keys.items():
            pause = 0.0005
            # Asked again and again: a thread that waits inside the store cannot be ended with the process.
            while not self.has(key) and rank not in gone and not (unless and self.has(unless)):
                if time.monotonic() > deadline:
                    before, beats = beats, {each: self._beat(each) for each in keys.keys() - heard.keys()}
                    gone = {each for each, beat in beats.items() if beat == before.get(each)}
                    deadline = time.monotonic() + 2 * self.timeout / BEATS
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, POLL_SECONDS)
            heard[rank] = self.read(key) if self.has(key) else None
        return heard

    def _beat(self, rank: int | None) -> Any:
        """Return what the rank last said of its being at work, if it did."""
        return self.read(f"alive-{rank}") if self.has(f"alive-{rank}") else None

    def delete(self, *keys: str) -> None:
        """Remove messages that all have read."""
        for key in keys:
            self.store.delete_key(f"{self.prefix}/{key}")

    def failures(self, messages: Iterable[tuple[int, Message | None]]) -> list[str]:
        """Return the errors that these ranks sent; None for a rank that sent none."""
        silent = {"error": f"no vote within {self.timeout:g} s; it died or hangs"}
        said = [(rank, (silent if message is None else message).get("error")) for rank, message in messages]
        return [f"rank {rank}: {error}" for rank, error in said if error is not None]
