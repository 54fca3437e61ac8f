"""What stands between the user's DataLoader and its data: index batches, or an iterable's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from attrs import define, field, frozen
from torch.utils.data import get_worker_info

from accel_core.data.position import Progress
from accel_core.data.sharding import COMPLETE, Deal, cut
from accel_core.data.shuffling import Draw
from accel_core.data.stateful import Shares

__all__ = ["IndexFeed", "ShareCollate", "ShareWorker"]


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
