"""Weighted sources as one map-style dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from torch.utils.data import Dataset

__all__ = ["Mixture"]

BLOCK: Final = 1000
"""Most samples per block, in which the weights are met exactly."""


class Mixture(Dataset[Any]):
    """Map-style dataset that takes samples from several sources in exact proportions per block.

    A block is up to 1,000 samples. In each block a source has its weight's share of the places, to within one
    sample, at places that are shuffled by (seed, epoch, block). A source that runs out begins again in a new
    order; the orders are drawn from (seed, source, round). An index is computed from these numbers alone, so
    a loader over a mixture shares out, shuffles and resumes as any other map-style data.

    Args:
        sources: map-style datasets, none of them empty.
        weights: positive share of each source; they need not add up to 1.
        seed: seed of all orders.
        length: number of samples per epoch; default: that of all sources together.

    Raises:
        ValueError: a source is empty, or weights do not fit.
    """

    def __init__(
        self, sources: Sequence[Any], weights: Sequence[float], *, seed: int, length: int | None = None
    ) -> None:
        if len(sources) != len(weights) or not sources:
            raise ValueError(f"Mixture needs a weight per source, got {len(weights)} for {len(sources)}")
        if any(not weight > 0 for weight in weights) or not np.isfinite(sum(weights)):
            raise ValueError(f"weights must be positive numbers, got {list(weights)}")
        if empty := [number for number, source in enumerate(sources) if not len(source)]:
            raise ValueError(f"sources {empty} are empty: leave them out")
        self.sources, self.seed, self.epoch = list(sources), seed, 0
        self.length = sum(map(len, self.sources)) if length is None else length
        self._counts = _shares(np.asarray(weights, dtype=float))
        self._cached: tuple[tuple[int, int], Any] = ((-1, -1), None)
        self._orders: dict[int, tuple[int, Any]] = {}

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch: its places and samples continue where the epoch before ended."""
        self.epoch = epoch

    def source_of(self, index: int) -> tuple[int, int]:
        """Return (number of the source, index in the source) of a sample of this epoch."""
        if not -self.length <= index < self.length:
            raise IndexError(index)
        block, place = divmod(self.epoch * self.length + index % self.length, int(self._counts.sum()))
        sources, before = self._block(block)
        source = int(sources[place])
        taken = block * int(self._counts[source]) + int(before[place])
        round_, at = divmod(taken, len(self.sources[source]))
        return source, int(self._order(source, round_)[at])

    def __getitem__(self, index: int) -> Any:
        source, at = self.source_of(index)
        return self.sources[source][at]

    def _block(self, block: int) -> Any:
        """Return for each place of the block (its source, samples of that source before it)."""
        key = (self.epoch, block)
        if self._cached[0] != key:
            sources = np.repeat(np.arange(len(self._counts)), self._counts)
            np.random.default_rng([self.seed, block]).shuffle(sources)
            before = np.empty_like(sources)
            for source, count in enumerate(self._counts):
                before[sources == source] = np.arange(count)
            self._cached = key, (sources, before)
        return self._cached[1]

    def _order(self, source: int, round_: int) -> Any:
        if self._orders.get(source, (-1, None))[0] != round_:
            order = np.random.default_rng([self.seed, source, round_, 1]).permutation(
                len(self.sources[source])
            )
            self._orders[source] = round_, order
        return self._orders[source][1]


def _shares(weights: Any) -> Any:
    """Return the number of each source's places per block: at least 1, and whole for simple weights."""
    for size in range(len(weights), BLOCK + 1):
        counts = weights / weights.sum() * size
        if np.allclose(counts, counts.round(), atol=1e-9) and counts.round().min() >= 1:
            return counts.round().astype(int)
    counts = np.maximum(np.floor(weights / weights.sum() * BLOCK), 1).astype(int)
    rest = weights / weights.sum() * BLOCK - counts
    for source in np.argsort(-rest, kind="stable")[: max(0, BLOCK - int(counts.sum()))]:
        counts[source] += 1
    return counts
