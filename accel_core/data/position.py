"""Position of a loader in its data: as saved, and while an iteration runs."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import Factory, asdict, define, field, frozen

from accel_core.data.sharding import LAST_ROUND, PARTIAL_ROUND, Sharding
from accel_core.errors import AccelError, CheckpointError, ConfigError

Kind = Literal["indexed", "batches", "replay", "stateful"]
Drawn = int | str | None
"""Source of an epoch's order: a seed, a generator's state (base64), or nothing."""
Streams = Mapping[str, str]
"""States of random streams (base64), by name."""


@frozen(kw_only=True)
class Position:
    """A loader's position, JSON-able.

    It counts batches that the user was given, not those that were prefetched.

    kind: `indexed` counts samples of the order: any number of readers and workers goes on from it.
        `batches` counts the user's own batch sampler's batches: any number of readers and workers.
        `replay` counts batches of an iterable dataset, which is read again from its start and skipped:
        the same batch size; any number of readers, unless there are several workers.
        `stateful` counts rounds, and holds what the loader says itself: the same `dealt`.
    epoch: iterations over the loader that were begun before this one.
    consumed: samples, batches or rounds of this epoch, without padding.
    sampler: name of what orders samples or batches, and a checksum of the indices that they are chosen by;
        "" where nothing orders them.
    drawn: what this epoch's order was drawn from; None before it was, or where nothing is random.
    draws: those that the user's generator of the order has made in this epoch; -1 where it has made all.
    workers: state of the generator that the seeds of this epoch's workers were drawn from.
    streams: states of the process's streams as this epoch began, where data of the user's own may draw its
        order from them in the process; a second mapping where they were others at its first read.
    first: a reader, and a checksum of the first batch that it read of an iterable dataset in this epoch.
    generators: states of the generators the loader was given, by role, as they are now.
    length: samples (or batches) of an epoch, where known.
    dealt: (batches a round, batch size, workers).
    state: of a `stateful` loader; None where an epoch begins, and where another process reads.
    following: number of the next epoch.
    ended: the epoch's last batch was handed out, of all readers.
    left: no loop over the loader was running any more.
    opened: as in `Progress`.
    begun: any epoch was. dataset: until then, the state of a `stateful` loader's dataset.
    """

    kind: Kind
    epoch: int = 0
    consumed: int = 0
    sampler: str = ""
    drawn: Drawn = None
    draws: int = -1
    workers: str | None = None
    streams: Sequence[Streams] = ()
    first: Sequence[Any] = ()
    generators: Mapping[str, str] = field(factory=dict)
    length: int | None = None
    dealt: tuple[int, ...] = ()
    state: Any = None
    following: int = 1
    ended: bool = False
    left: bool = False
    opened: bool = False
    begun: bool = field(
        default=Factory(
            lambda self: self.epoch > 0 or self.drawn is not None or self.consumed > 0, takes_self=True
        )
    )
    dataset: Any = None

    def to_json(self) -> dict[str, Any]:
        """Return a dict of values that JSON can hold; `state` is as its loader gave it."""
        fields = asdict(self, recurse=False)
        first = fields.pop("first")
        kept = {"first": list(first)} if first else {}
        return {**fields, "generators": dict(self.generators), "dealt": list(self.dealt), **kept}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], current: Position) -> Position:
        """Return the position that `saved` describes, for a loader at `current`.

        Raises:
            CheckpointError: the loader has changed in a way that its kind does not survive.
        """
        position = cls(**{**saved, "dealt": tuple(saved["dealt"])})
        if position.kind != current.kind:
            raise CheckpointError(
                f"a dataloader was saved as {position.kind!r}, but the one prepared here is"
                f" {current.kind!r}\n"
                "prepare the loaders in the order in which they were saved"
            )
        midway = position.consumed > 0
        if midway and position.length != current.length:
            raise CheckpointError(
                f"a dataloader was saved in the middle of an epoch of {position.length}, but here an epoch"
                f" has {current.length}\nresume with the dataset and sampler that it was saved with"
            )
        if midway and not _goes_on(position, current):
            raise CheckpointError(
                f"a {position.kind!r} dataloader was saved mid-epoch with (batches a round, batch size,"
                f" workers) = {position.dealt}, here they are {current.dealt}\n"
                "resume with the same, or at the start of an epoch"
            )
        return position

    def is_over(self, deal: Sharding) -> bool:
        """Return whether the epoch has no round left, with rounds shared out like this."""
        if self.ended or self.length is None or not self.consumed or self.kind == "stateful":
            return self.ended
        left = self.length - self.consumed
        a_round = (deal.samples or 1) if self.kind == "indexed" else deal.batches
        return left < (a_round if deal.drop_last else 1)


def _goes_on(saved: Position, current: Position) -> bool:
    if saved.kind in ("indexed", "batches") or saved.dealt == current.dealt:
        return True
    (_, size, workers), (_, new_size, new_workers) = saved.dealt, current.dealt
    return saved.kind == "replay" and size == new_size and max(workers, new_workers) <= 1


@define(eq=False)
class Progress:
    """One iteration over a loader, while it happens. Mutable, and cheap to advance.

    start: what was consumed before it began. resumed: it goes on with an epoch that was begun before.
    opened: it was begun, and a loader's numbers drawn, if perhaps not the order's.
    draws: as in `Position`; until it begins, those of the iteration before.
    workers, streams, first, state: as in `Position`.
    count: batches handed to the user. total: how many there are, -1 until known.
    padded: number of a batch -> real samples in its round, PARTIAL_ROUND or LAST_ROUND; NO_PADDING is left
        out.
    readers_with_batch: number of a round -> readers that have a batch in it, where not all do and this
        process reads for all.
    following: readers that have a batch in the next round, where the reading process tells; -1 elsewhere.
    term: as in `Cursor`. is_broken: it ended with an error.
    """

    epoch: int = 0
    start: int = 0
    drawn: Drawn = None
    draws: int = -1
    resumed: bool = False
    opened: bool = False
    workers: str | None = None
    streams: Sequence[Streams] = ()
    first: Sequence[Any] = ()
    state: Any = None
    count: int = 0
    total: int = -1
    padded: dict[int, int] = field(factory=dict)
    readers_with_batch: dict[int, int] = field(factory=dict)
    following: int = -1
    term: int = 0
    is_broken: bool = False

    @property
    def is_unshared(self) -> bool:
        """True while the user holds a batch of a round in which some readers have none."""
        return bool(self.padded) and self.padded.get(self.count) == PARTIAL_ROUND

    @property
    def is_last_of_all(self) -> bool:
        """True while the user holds a batch of the last round, which all readers share."""
        return self.padded.get(self.count) == LAST_ROUND


@define(eq=False)
class Cursor:
    """Position of a loader and its views while iterations run.

    It is the only source of which batch the user holds.

    progress: the iteration that handed out the last batch of those that go on; else the one broken off
        last, or the planned one. planned: the iteration that begins next, if it is known.
    running: iterations that go on, the one that handed out the last batch at the end.
    following: number of the next epoch.
    term: iterations of an earlier term cannot go on, because of `ended_by`.
    """

    progress: Progress = field(factory=Progress)
    planned: Progress | None = field(default=Factory(lambda self: self.progress, takes_self=True))
    running: list[Progress] = field(factory=list)
    following: int = 0
    term: int = 0
    ended_by: str = ""

    @property
    def epoch(self) -> int:
        """The number of the iteration that goes on, else of the next one."""
        if self.running:
            return self.progress.epoch
        return self.following if self.planned is None else self.planned.epoch

    def plan(self, progress: Progress) -> None:
        """Make this the next iteration."""
        self.progress = self.planned = progress
        self.following = progress.epoch

    def begin(self, skip: int) -> Progress:
        """Begin the next iteration, from its unit `skip` on if that is not 0."""
        progress, self.planned = self.planned or Progress(epoch=self.following), None
        progress.start, progress.term = skip or progress.start, self.term
        self.following = max(self.following, progress.epoch + 1)
        self.progress = progress
        return progress

    def hold(self, progress: Progress) -> None:
        """Note that the user is handed a batch of this iteration."""
        if progress in self.running:
            self.running.remove(progress)
        self.running.append(progress)
        self.progress = progress

    def leave(self, progress: Progress, *, finished: bool) -> None:
        """Note that this iteration is over, or was left early."""
        if progress in self.running:
            self.running.remove(progress)
        if self.progress is not progress:
            return
        if self.running:
            self.progress = self.running[-1]
        elif finished:
            self.progress = self.planned = self.planned or Progress(epoch=self.following)

    def cut_off(self, reason: str) -> None:
        """End all iterations that go on; asked for a batch, they raise with this reason."""
        self.term, self.ended_by = self.term + 1, reason
        self.running.clear()

    def check(self, progress: Progress) -> None:
        """Raise AccelError if this iteration cannot go on."""
        if progress.term != self.term:
            raise AccelError(self.ended_by)


def number_of_epoch(epoch: Any) -> int:
    """Return an epoch's number as Python's own, which a position can hold as JSON.

    Raises:
        ConfigError: it is not a whole number.
    """
    try:
        return operator.index(epoch)
    except TypeError as error:
        raise ConfigError(
            f"set_epoch: {epoch!r:.80} is not the number of an epoch\ngive a whole number, such as 0"
        ) from error
