"""Where a loader stands in its data: what is saved, and what it takes to go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import define, field, frozen

from accel_core.errors import CheckpointError

__all__ = ["Drawn", "Position", "Progress"]

Kind = Literal["indexed", "batches", "replay"]
Drawn = int | str | None
"""What an epoch's order was drawn from: a seed, a generator's state (base64), or nothing."""


@frozen(kw_only=True)
class Position:
    """A loader's place in its data, JSON-able. Counts what was handed to the user, not what was prefetched.

    kind: `indexed` counts samples of the order: any number of readers and workers goes on from it.
        `batches` counts the user's own batch sampler's batches: any number of readers.
        `replay` counts rounds of an iterable dataset, which is read again from its start and skipped:
        the same number of readers, batch size and workers.
    epoch: iterations over the loader that were begun before this one.
    consumed: samples, batches or rounds of this epoch, without padding.
    drawn: what this epoch's order was drawn from; None before it was, or where nothing is random.
    generators: states of the generators the loader was given, by role, as they are now.
    length: samples (or batches) of an epoch, where known. per_round: what a round is, for `replay`.
    """

    kind: Kind
    epoch: int = 0
    consumed: int = 0
    drawn: Drawn = None
    generators: Mapping[str, str] = field(factory=dict)
    length: int | None = None
    per_round: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dict of what JSON can hold."""
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "drawn": self.drawn,
            "generators": dict(self.generators),
            "length": self.length,
            "per_round": list(self.per_round),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], here: Position) -> Position:
        """The position that `saved` describes, for a loader that is at `here` now.

        Raises:
            CheckpointError: the loader has changed in a way that its kind does not survive.
        """
        found = cls(**{**saved, "per_round": tuple(saved["per_round"])})
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
        if midway and found.per_round != here.per_round:
            raise CheckpointError(
                f"an iterable dataset was saved mid-epoch with (readers, batch size, workers) ="
                f" {found.per_round}, here they are {here.per_round}\n"
                "resume with the same, or at the start of an epoch"
            )
        return found


@define(eq=False)
class Progress:
    """One iteration over a loader, while it happens. Mutable, and cheap to advance.

    start: what was consumed before it began. resumed: it goes on with an epoch that was begun before.
    count: batches handed to the user. total: how many there are, -1 until known.
    padded: number of a batch -> real samples in its round, for the rounds that are padded.
    """

    epoch: int = 0
    start: int = 0
    drawn: Drawn = None
    resumed: bool = False
    count: int = 0
    total: int = -1
    padded: dict[int, int] = field(factory=dict)
