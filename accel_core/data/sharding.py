"""The global order and its division between readers: pure functions, no torch.

One epoch is one order of samples, cut into batches. A *round* is the data that all readers take together:
`readers` batches, or one batch that they split. Reader r takes batch (or slice) r of each round, so the order
never depends on the number of readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice, repeat
from typing import Final, TypeVar

from attrs import frozen

T = TypeVar("T")

NO_PADDING: Final = -1
"""Mark of a round that holds no padding."""
PARTIAL_ROUND: Final = -2
"""Mark of a round in which some readers have no batch."""
LAST_ROUND: Final = -3
"""Mark of a last round that is not padded and gives every reader a batch."""


@frozen(kw_only=True)
class Sharding:
    """The division of rounds between readers. Picklable, so that DataLoader workers can divide rounds too.

    Attributes:
        reader: number of the reader that takes the share (from the topology).
        readers: number of readers.
        batch_size: samples per batch; None if batches vary (a batch sampler of the user's own).
        split: a round is one batch, split between the readers, instead of a batch for each reader.
        even: pad the last round with samples from the start of the order, so that each reader has a batch.
        drop_last: leave out a last round that is not complete.
    """

    reader: int = 0
    readers: int = 1
    batch_size: int | None = 1
    split: bool = False
    even: bool = True
    drop_last: bool = False

    @property
    def batches(self) -> int:
        """Number of batches in a round."""
        return 1 if self.split else self.readers

    @property
    def samples(self) -> int | None:
        """Number of samples in a complete round; None if batches have no fixed size."""
        return None if self.batch_size is None else self.batches * self.batch_size

    @property
    def wanted(self) -> int:
        """Number of samples from the start of the order that padding may need.

        If batches have no fixed size, it is a number of batches.
        """
        if self.readers == 1 or self.drop_last or not self.even:
            return 0
        return self.samples or self.batches

    def shares(
        self,
        batches: Iterable[Sequence[T]],
        head: Sequence[T],
        *,
        everyone: bool = False,
    ) -> Iterator[tuple[Sequence[Sequence[T]], int]]:
        """Return pairs ([this reader's batch], real samples in its round), one per round.

        The number is NO_PADDING, PARTIAL_ROUND or LAST_ROUND unless the round is padded.

        Args:
            batches: the batches of the order.
            head: the first `wanted` samples of the order (batches, if they have no fixed size).
            everyone: return the batches of all readers that have a batch in the round.
        """
        if self.readers == 1:  # fast path: with one reader, batches pass through without a Python frame
            return zip(zip(batches, strict=True), repeat(NO_PADDING), strict=False)
        own = slice(None) if everyone else slice(self.reader, self.reader + 1)
        return self._shares(batched(batches, self.batches), head, own)

    def _shares(
        self, rounds: Iterator[list[Sequence[T]]], head: Sequence[T], own: slice
    ) -> Iterator[tuple[Sequence[Sequence[T]], int]]:
        for group, last in with_last(rounds):
            shares, real_samples = self._slices(group[0]) if self.split else group, NO_PADDING
            if (last or self.split) and not self._is_complete(group):
                if self.drop_last:
                    continue
                if self.even:
                    shares, real_samples = self._padded(group, head), sum(map(len, group))
                elif len(shares) < self.readers:
                    real_samples = PARTIAL_ROUND
                elif last:
                    real_samples = LAST_ROUND
            elif last and not self.even:
                real_samples = LAST_ROUND
            if share := shares[own]:
                yield share, real_samples

    def length(self, batches: int, samples: int | None = None) -> int:
        """Return the number of this reader's shares of so many batches (and samples, if known)."""
        rounds, over = divmod(batches, self.batches)
        if self.split:
            # A short last batch may have too few samples to give each reader a slice.
            short = samples is not None and self.batch_size is not None and samples % self.batch_size
            misses_out = short and not (self.even or self.drop_last) and short <= self.reader * self._slice
            return batches - bool(misses_out)
        if not over or self.drop_last:
            return rounds
        return rounds + (self.even or self.reader < over)

    @property
    def _slice(self) -> int:
        """Number of samples that one reader takes of a complete round."""
        assert self.batch_size is not None
        return self.batch_size // self.readers if self.split else self.batch_size

    def _is_complete(self, group: Sequence[Sequence[T]]) -> bool:
        return len(group) == self.batches and (self.batch_size is None or len(group[-1]) == self.batch_size)

    def _slices(self, samples: Sequence[T]) -> list[Sequence[T]]:
        return [samples[start : start + self._slice] for start in range(0, len(samples), self._slice)]

    def _padded(self, group: list[Sequence[T]], head: Sequence[T]) -> list[Sequence[T]]:
        """Return a batch for each reader from a round that is not complete.

        If batches have a size, samples are added: from the start of the order, or from the round itself
        without a head. Otherwise whole batches are added from the start of the order. Batches larger than
        their sampler states are filled up with whole batches of the round.
        """
        samples, size = list(chain(*group)), self.batch_size
        if size is not None and len(samples) <= size * self.batches:
            filling = cycle(head or samples)
            return self._slices(list(islice(chain(samples, filling), size * self.batches)))
        more = head if self.samples is None else group
        return list(islice(chain(group, cycle(more)), self.readers))  # type: ignore[arg-type]


def batched(items: Iterable[T], size: int, *, drop_last: bool = False) -> Iterator[list[T]]:
    """Yield lists of `size` items; the last list may be shorter, or is left out if `drop_last`."""
    iterator = iter(items)
    while len(run := [*islice(iterator, size)]) == size:
        yield run
    if run and not drop_last:
        yield run


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item and whether it is the last one, which is known by reading one item ahead."""
    iterator = iter(items)
    try:
        item = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield item, False
        item = following
    yield item, True


def split_head(items: Iterable[T], count: int, skip: int) -> tuple[list[T], Iterator[T]]:
    """Return (the first `count` items, all items but the first `skip`).

    At least one item is read at once, so that samplers draw their order now. A range is never read through.
    """
    if isinstance(items, range):
        return [*items[:count]], iter(items[skip:])  # type: ignore[arg-type]  # of T, since items are
    iterator = iter(items)
    head = list(islice(iterator, max(count, 1)))
    rest = chain(head, iterator)
    next(islice(rest, skip, skip), None)
    return head[:count], rest
