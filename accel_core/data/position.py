"""Where a loader stands in its data: what is saved, and what it takes to go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import asdict, define, field, frozen

from accel_core.errors import CheckpointError

__all__ = ["Cursor", "Drawn", "Kind", "Position", "Progress"]

Kind = Literal["indexed", "batches", "replay", "stateful"]
Drawn = int | str | None
"""What an epoch's order was drawn from: a seed, a generator's state (base64), or nothing."""


@frozen(kw_only=True)
class Position:
    """A loader's place in its data, JSON-able. Counts what was handed to the user, not what was prefetched.

    kind: `indexed` counts samples of the order: any number of readers and workers goes on from it.
        `batches` counts the user's own batch sampler's batches: any number of readers and workers.
        `replay` counts batches of an iterable dataset, which is read again from its start and skipped:
        the same batch size; any number of readers, unless there are several workers.
        `stateful` counts rounds, and holds what the loader says itself: the same `dealt`.
    epoch: iterations over the loader that were begun before this one.
    consumed: samples, batches or rounds of this epoch, without padding.
    drawn: what this epoch's order was drawn from; None before it was, or where nothing is random.
    workers: state of the generator that the seeds of this epoch's workers were drawn from.
    generators: states of the generators the loader was given, by role, as they are now.
    length: samples (or batches) of an epoch, where known.
    dealt: (batches a round, batch size, workers).
    state: of a `stateful` loader; None where an epoch begins, and where another process reads.
    """

    kind: Kind
    epoch: int = 0
    consumed: int = 0
    drawn: Drawn = None
    workers: str | None = None
    generators: Mapping[str, str] = field(factory=dict)
    length: int | None = None
    dealt: tuple[int, ...] = ()
    state: Any = None

    def to_json(self) -> dict[str, Any]:
        """A dict of what JSON can hold; `state` is as its loader gave it."""
        found = asdict(self, recurse=False)
        return {**found, "generators": dict(self.generators), "dealt": list(self.dealt)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], here: Position) -> Position:
        """The position that `saved` describes, for a loader that is at `here` now.

        Raises:
            CheckpointError: the loader has changed in a way that its kind does not survive.
        """
        found = cls(**{**saved, "dealt": tuple(saved["dealt"])})
        if found.kind != here.kind:
            raise CheckpointError(
                f"a dataloader was saved as {found.kind!r}, but the one prepared here is {here.kind!r}\n"
                "prepare the loaders in the order in which they were saved"
            )
        midway = found.consumed > 0
        if midway and found.length != here.length:
            raise CheckpointError(
                f"a dataloader was saved in the middle of an epoch of {found.length}, but here an epoch has"
                f" {here.length}\nresume with the dataset and sampler that it was saved with"
            )
        if midway and not _goes_on(found, here):
            raise CheckpointError(
                f"a {found.kind!r} dataloader was saved mid-epoch with (batches a round, batch size, workers)"
                f" = {found.dealt}, here they are {here.dealt}\n"
                "resume with the same, or at the start of an epoch"
            )
        return found


def _goes_on(found: Position, here: Position) -> bool:
    if found.kind in ("indexed", "batches") or found.dealt == here.dealt:
        return True
    (_, size, workers), (_, new_size, new_workers) = found.dealt, here.dealt
    return found.kind == "replay" and size == new_size and max(workers, new_workers) <= 1


@define(eq=False)
class Progress:
    """One iteration over a loader, while it happens. Mutable, and cheap to advance.

    start: what was consumed before it began. resumed: it goes on with an epoch that was begun before.
    workers, state: as in `Position`.
    count: batches handed to the user. total: how many there are, -1 until known.
    padded: number of a batch -> real samples in its round, or UNSHARED, where it is not COMPLETE.
    takers: number of a round -> readers that have a batch in it, where not all do (told to one that
        reads for all).
    """

    epoch: int = 0
    start: int = 0
    drawn: Drawn = None
    resumed: bool = False
    workers: str | None = None
    state: Any = None
    count: int = 0
    total: int = -1
    padded: dict[int, int] = field(factory=dict)
    takers: dict[int, int] = field(factory=dict)


@define(eq=False)
class Cursor:
    """Where a loader and its views stand. pending: `progress` has yet to be iterated."""

    progress: Progress = field(factory=Progress)
    pending: bool = True

    def begin(self, skip: int) -> Progress:
        last = self.progress
        progress = last if self.pending else Progress(epoch=last.epoch + 1)
        if skip:
            progress.start = skip
        self.progress, self.pending = progress, False
        return progress

    def finish(self, progress: Progress) -> None:
        if self.progress is progress:
            self.progress, self.pending = Progress(epoch=progress.epoch + 1), True
