"""Position of a loader in its data: as saved, and while an iteration runs."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from attrs import Factory, asdict, define, field, frozen
from torch import Tensor

from accel_core.data.sharding import LAST_ROUND, PARTIAL_ROUND, Sharding
from accel_core.errors import CheckpointError

Kind = Literal["indexed", "batches", "replay", "stateful"]
Drawn = int | str | None
"""Source of an epoch's order: a seed, a generator's state (base64), or None."""


@frozen(kw_only=True)
class Position:
    """A loader's position, JSON-able. It counts batches handed to the user, not prefetched batches.

    Attributes:
        kind: `indexed` counts samples of the order: any number of readers and workers can continue. `batches`
            counts batches of the user's own batch sampler: any number of readers and workers. `replay` counts
            batches of an iterable dataset, which is read again from its start and skipped: the same batch
            size; any number of readers, unless there are several workers. `stateful` counts rounds of an
            iterable dataset, and holds the loader's own state: the same `dealt`.
        epoch: number of iterations over the loader that were begun before this one.
        following: number of the next epoch.
        consumed: samples, batches or rounds of this epoch, without padding.
        length: samples (or batches) per epoch; None if unknown.
        dealt: (batches per round, batch size, workers, True if one process reads a `stateful` loader for
            all).
        share: (reader, readers) if the data shares itself out, and only this reader can continue; else empty.
        sampler: name of the sampler of samples or batches; "" if there is no sampler.
        drawn: source of this epoch's order; None before the order is drawn, or if nothing is random.
        generators: current states of the generators that the user passed to the loader, by role.
        state: state of a `stateful` loader; None at the start of an epoch, and if another process reads.
        begun: the seeds of this epoch were drawn.
        ended: the last batch of the epoch was handed out to all readers.
    """

    kind: Kind
    epoch: int = 0
    following: int = 1
    consumed: int = 0
    length: int | None = None
    dealt: tuple[int, ...] = ()
    share: tuple[int, ...] = ()
    sampler: str = ""
    drawn: Drawn = None
    generators: Mapping[str, str] = field(factory=dict)
    state: Any = None
    begun: bool = False
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a dict of values that JSON can hold; `state` is unchanged."""
        return {**asdict(self, recurse=False), "dealt": list(self.dealt), "share": list(self.share)}

    def require_same(self, current: Position) -> None:
        """Raise CheckpointError if a loader at `current` cannot continue in the middle of this epoch."""
        changes = []
        if self.share != current.share:
            shares = [
                "share {} of {}, which the data makes itself,".format(*share)
                if share
                else "one order for all"
                for share in (self.share, current.share)
            ]
            changes.append(f"{shares[0]} here {shares[1]}")
        if self.length != current.length:
            changes.append(f"{self.length} samples or batches, here {current.length}")
        if self.sampler != current.sampler:
            changes.append(f"the order of {self.sampler}, here {current.sampler}")
        if not _goes_on(self, current):
            words = "(batches per round, batch size, workers, one process reads for all)"
            changes.append(f"{words} = {self.dealt}, here {current.dealt}")
        if changes:
            raise CheckpointError(
                f"a {self.kind!r} dataloader was saved in the middle of an epoch: {'; '.join(changes)}\n"
                "resume with the same, or at the start of an epoch"
            )

    def is_over(self, deal: Sharding) -> bool:
        """Return whether the epoch has no round left if rounds are shared out by `deal`."""
        if self.ended or self.length is None or not self.consumed or self.kind == "stateful":
            return self.ended
        left = self.length - self.consumed
        a_round = (deal.samples or 1) if self.kind == "indexed" else deal.batches
        return left < (a_round if deal.drop_last else 1)


def _goes_on(saved: Position, current: Position) -> bool:
    if saved.kind in ("indexed", "batches") or saved.dealt == current.dealt:
        return True
    (_, size, workers, _), (_, new_size, new_workers, _) = saved.dealt, current.dealt
    return saved.kind == "replay" and size == new_size and max(workers, new_workers) <= 1


@define(eq=False)
class Progress:
    """One iteration over a loader while it runs. Mutable, and cheap to advance.

    Attributes:
        epoch: number of the iteration.
        start: units of the position that were consumed before the iteration began.
        begun: as in `Position`; likewise `drawn` and `state`.
        count: number of batches handed to the user.
        total: number of batches of the iteration; -1 until known.
        settled: number of batches that a position counts; None: all that were handed out.
        ends: this reader's number of batches when no reader has another; -1 until known. Only if one process
            reads for all, or the data shares itself out: then 0 until known.
        padded: number of a batch -> real samples in its round, PARTIAL_ROUND or LAST_ROUND. Batches of rounds
            with the mark NO_PADDING are absent.
        states: number of a batch that was read but not counted yet -> state of a `stateful` loader after it.
        readers_with_batch: number of a round -> readers that have a batch in it. Only rounds that lack some,
            and only if this process reads for all.
        order: number of the iteration in the process, by the order of first batches.
        is_inner: the iteration was begun inside another loader's loop, and that loop has not drawn a batch
            since.
        is_held: a loop around the iteration has drawn a batch since: the program draws from both by turns.
        batch: returns the batch that the user holds; None if no loop of this process hands batches out.
    """

    epoch: int = 0
    start: int = 0
    begun: bool = False
    drawn: Drawn = None
    state: Any = None
    count: int = 0
    total: int = -1
    settled: int | None = None
    ends: int = -1
    padded: dict[int, int] = field(factory=dict)
    states: dict[int, Any] = field(factory=dict)
    readers_with_batch: dict[int, int] = field(factory=dict)
    order: int = 0
    is_inner: bool = False
    is_held: bool = False
    batch: Callable[[], Any] | None = None

    @property
    def counted(self) -> int:
        """Number of batches that a position counts."""
        return self.count if self.settled is None else self.settled

    @property
    def is_unshared(self) -> bool:
        """True while the user holds a batch of a round in which some readers have none."""
        return bool(self.padded) and self.padded.get(self.count) == PARTIAL_ROUND

    def is_last_of_all(self, deal: Sharding, workers: int) -> bool:
        """Return whether no reader gets a batch after the counted batches, as far as this process knows."""
        if self.ends >= 0 or not self.counted:
            return self.ends == self.counted > 0
        mark = self.padded.get(self.counted)
        alike = deal.even or deal.drop_last or deal.readers == 1 or mark == PARTIAL_ROUND
        # Each worker shares out a stream of its own: with several, the end of one stream is not the last.
        alike = alike or (mark == LAST_ROUND and workers <= 1)
        return alike and self.counted == self.total

    def settle(self) -> None:
        """Make positions count the batches that are handed out by now."""
        self.settled = self.count
        for number in [number for number in self.states if number <= self.count]:
            self.state = self.states.pop(number)


@define(eq=False)
class Cursor:
    """Position of a loader and its views while iterations run: tells which batch the user holds.

    Attributes:
        progress: the running iteration that handed out the last batch; if none runs, the iteration that was
            left last, or the planned one.
        planned: the iteration that begins next, if known.
        running: the running iterations; the last one has handed out the last batch.
        following: number of the next epoch.
    """

    progress: Progress = field(factory=Progress)
    planned: Progress | None = field(default=Factory(lambda self: self.progress, takes_self=True))
    running: list[Progress] = field(factory=list)
    following: int = 0

    @property
    def epoch(self) -> int:
        """Number of the running iteration; if none runs, of the next one."""
        if self.running:
            return self.progress.epoch
        return self.following if self.planned is None else self.planned.epoch

    def plan(self, progress: Progress) -> None:
        """Make this the next iteration."""
        self.progress = self.planned = progress
        self.following = progress.epoch

    def begin(self, skip: int) -> Progress:
        """Begin the next iteration, at unit `skip` of its epoch unless that is 0."""
        progress, self.planned = self.planned or Progress(epoch=self.following), None
        progress.start = skip or progress.start
        self.following = max(self.following, progress.epoch + 1)
        self.progress = progress
        return progress

    def hold(self, progress: Progress) -> None:
        """Record that the user is handed a batch of this iteration."""
        if progress in self.running:
            self.running.remove(progress)
        self.running.append(progress)
        self.progress = progress

    def leave(self, progress: Progress, *, finished: bool) -> None:
        """Record that this iteration is over (`finished`), or was left early.

        An iteration that was left inside another loader's loop is over too, such as a validation that was cut
        short.
        """
        progress.batch = None
        if progress in self.running:
            self.running.remove(progress)
        if self.progress is not progress:
            return
        if self.running:
            self.progress = self.running[-1]
        elif finished or progress.is_inner:
            self.progress = self.planned = self.planned or Progress(epoch=self.following)


def encode(state: Tensor) -> str:
    """Return a generator's state (uint8) as text."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def decode(text: str) -> Tensor:
    """Return the generator state that `encode` wrote."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
