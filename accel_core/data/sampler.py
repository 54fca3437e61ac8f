"""What stands between the user's DataLoader and its data: index batches, or an iterable's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

from attrs import define, field, frozen
from torch.utils.data import IterableDataset, get_worker_info

from accel_core.data.draw import Draw
from accel_core.data.order import COMPLETE, Deal, cut, opening
from accel_core.data.position import Progress
from accel_core.data.stateful import StatefulShares, is_stateful

__all__ = ["IndexFeed", "ShardedIterable", "ShareCollate", "ShareWorker", "Shares"]

Shares: TypeAlias = tuple[list[Any], int]
"""Batches of one round, and how many samples of the round are real (see `Deal.shares`)."""


@define(eq=False, kw_only=True)
class IndexFeed:
    """Takes the place of a DataLoader's (batch) sampler: this reader's index batches, epoch by epoch.

    It reads one round ahead, on indices alone, and so knows the last batch before it is fetched.
    batch_size: samples to cut the order into; None where the order is one of batches already.
    """

    draw: Draw
    deal: Deal
    batch_size: int | None
    single: bool = False
    """The loader does not batch: it takes an index where others take a list of indices."""
    everyone: bool = False
    """Feed a process that reads for all: each round gives the batches of all readers, in turn."""
    progress: Progress = field(factory=Progress, init=False)
    """The next iteration starts where it says, and writes to it."""

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.progress, self.deal)

    def __len__(self) -> int:
        items = len(self.draw.items)
        if self.batch_size is None:
            return self.deal.length(items)
        batches = items // self.batch_size if self.deal.drop_last else -(-items // self.batch_size)
        return self.deal.length(batches, items)

    def _batches(self, progress: Progress, deal: Deal) -> Iterator[Any]:
        head, batches = self._opened(progress, deal)
        number, held = 0, list[Any]()
        for shares, real in deal.shares(batches, head, everyone=self.everyone):
            number += 1
            if real != COMPLETE:
                progress.padded[number] = real
            if self.everyone and len(shares) < deal.readers:
                progress.takers[number] = len(shares)
            yield from held
            held = [share[0] for share in shares] if self.single else shares
        progress.total = number
        yield from held

    def _opened(self, progress: Progress, deal: Deal) -> tuple[list[Any], Iterator[Any]]:
        """(what the padding is taken from, the batches of the order)."""
        size = self.batch_size
        if size is not None:
            head, items = self.draw.open(progress, deal.wanted)
            return head, cut(items, size, drop_last=deal.drop_last)
        head, batches = self.draw.open(progress, deal.wanted and deal.batches)
        return head if deal.batch_size is None else list(chain(*head)), batches


class ShardedIterable(IterableDataset[Any]):
    """A reader's share of an iterable dataset: reads all of it, keeps every readers-th batch.

    Yields ([samples of a batch], real samples in its round), or the batches of all readers of the
    round for a process that reads for all; collated by `ShareCollate`.
    skip: batches that the next iteration leaves out, of all readers.
    """

    def __init__(
        self, dataset: IterableDataset[Any], deal: Deal, batch_size: int, *, everyone: bool, stateful: bool
    ) -> None:
        self.dataset, self.deal, self.batch_size = dataset, deal, batch_size
        self.everyone, self.stateful, self.skip = everyone, stateful, 0

    def __iter__(self) -> Iterator[Shares]:
        skip, self.skip = self.skip, 0
        source = iter(self.dataset)
        if self.stateful and (is_stateful(self.dataset) or is_stateful(source)):
            return StatefulShares(self, source)
        head, samples = opening(source, self.deal.wanted, skip * self.batch_size)
        return self.share(samples, head)

    def share(self, samples: Iterable[Any], head: Sequence[Any]) -> Iterator[Shares]:
        """The shares of these samples."""
        batches = cut(samples, self.batch_size, drop_last=self.deal.drop_last)
        return self.deal.shares(batches, head, everyone=self.everyone)


@frozen
class ShareCollate:
    """Collates the samples of shares as the user's loader would, and passes their real number on."""

    collate: Callable[[Any], Any]
    single: bool

    def __call__(self, found: Shares) -> Shares:
        shares, real = found
        return [self.collate(samples[0] if self.single else samples) for samples in shares], real


@frozen
class ShareWorker:
    """Initializes a worker as the user's loader would: what it finds as its dataset is the user's own."""

    initialize: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """In the worker, before it reads."""
        info = get_worker_info()
        assert info is not None  # and it refuses plain assignments
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self.initialize is not None:
            self.initialize(worker)
