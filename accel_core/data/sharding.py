"""The global order and how it is shared out to readers: pure functions, no torch.

One epoch is one order of samples, cut into batches. A *round* is what all readers take together:
`readers` batches, or one batch that they split. Reader r takes batch (or slice) r of each round, so
the order never depends on how many readers there are.
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
"""Mark of a complete last round, where readers may run out at different times."""


@frozen(kw_only=True)
class Sharding:
    """The way in which rounds are shared out.

    Picklable, so that DataLoader workers can share rounds out too.

    reader, readers: whose share, of how many (the topology's).
    batch_size: samples of a batch; None where batches vary (a batch sampler of the user's own).
    split: a round is one batch, split between the readers, instead of a batch for each.
    even: pad the last round with samples from the start of the order, so that each reader has one.
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
        """Batches in a round."""
        return 1 if self.split else self.readers

    @property
    def samples(self) -> int | None:
        """Samples in a complete round, where batches have a size."""
        return None if self.batch_size is None else self.batches * self.batch_size

    @property
    def wanted(self) -> int:
        """Number of samples from the start of the order that padding may need.

        Where batches have no size, it is a number of batches.
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
        """Return ([this reader's batch], real samples in its round), round by round.

        everyone: the batches of all readers that take part, instead.
        head: the first `wanted` samples of the order (without a batch size: batches).
        The second is NO_PADDING, PARTIAL_ROUND or LAST_ROUND, unless the round is padded.
        """
        if self.readers == 1:  # the way of each batch: no frame of ours is on it
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
        """Count this reader's shares of so many batches (of samples, where known)."""
        rounds, over = divmod(batches, self.batches)
        if self.split:
            short = samples is not None and self.batch_size is not None and samples % self.batch_size
            misses_out = short and not (self.even or self.drop_last) and short <= self.reader * self._slice
            return batches - bool(misses_out)
        if not over or self.drop_last:
            return rounds
        return rounds + (self.even or self.reader < over)

    @property
    def _slice(self) -> int:
        """Samples that one reader takes of a complete round."""
        assert self.batch_size is not None
        return self.batch_size // self.readers if self.split else self.batch_size

    def _is_complete(self, group: Sequence[Sequence[T]]) -> bool:
        return len(group) == self.batches and (self.batch_size is None or len(group[-1]) == self.batch_size)

    def _slices(self, samples: Sequence[T]) -> list[Sequence[T]]:
        return [samples[start : start + self._slice] for start in range(0, len(samples), self._slice)]

    def _padded(self, group: list[Sequence[T]], head: Sequence[T]) -> list[Sequence[T]]:
        """Return a batch for each reader, out of a round that is not complete.

        Where batches have a size, samples are added; else whole batches, from the start of the order, or
        (where batches are larger than their sampler states, and without a head) from the round itself.
        """
        samples, size = list(chain(*group)), self.batch_size
        if size is not None and len(samples) <= size * self.batches:
            filling = cycle(head or samples)
            return self._slices(list(islice(chain(samples, filling), size * self.batches)))
        more = head if self.samples is None else group
        return list(islice(chain(group, cycle(more)), self.readers))  # type: ignore[arg-type]


def batched(items: Iterable[T], size: int, *, drop_last: bool = False) -> Iterator[list[T]]:
    """Yield runs of `size` items; the last may be shorter, unless dropped."""
    iterator = iter(items)
    while len(run := [*islice(iterator, size)]) == size:
        yield run
    if run and not drop_last:
        yield run


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last: known by reading one item ahead."""
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

    Reads at least one item here and now: that is when samplers draw. A range is never read through.
    """
    if isinstance(items, range):
        return [*items[:count]], iter(items[skip:])  # type: ignore[arg-type]  # of T, since items are
    iterator = iter(items)
    head = list(islice(iterator, max(count, 1)))
    rest = chain(head, iterator)
    next(islice(rest, skip, skip), None)
    return head[:count], rest
