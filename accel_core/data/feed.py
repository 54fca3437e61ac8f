"""What stands between the user's DataLoader and its data: index batches, or an iterable's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attrs import field, frozen
from torch.utils.data import IterableDataset, get_worker_info

from accel_core.data.draw import Draw
from accel_core.data.order import COMPLETE, Deal, cut, opening
from accel_core.data.position import Progress

__all__ = ["IndexFeed", "ShardedIterable", "ShareCollate", "ShareWorker"]


@frozen(kw_only=True)
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
    _begun: list[Progress] = field(factory=lambda: [Progress()], init=False)

    def begin(self, progress: Progress) -> None:
        """The next iteration writes to `progress`, and starts where it says."""
        self._begun[0] = progress

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._begun[0])

    def __len__(self) -> int:
        items = len(self.draw.items)
        if self.batch_size is None:
            return self.deal.length(items)
        batches = items // self.batch_size if self.deal.drop_last else -(-items // self.batch_size)
        return self.deal.length(batches, items)

    def _batches(self, progress: Progress) -> Iterator[Any]:
        head, items = self.draw.open(progress, self.deal.wanted)
        batches = (
            items if self.batch_size is None else cut(items, self.batch_size, drop_last=self.deal.drop_last)
        )
        number, held = 0, None
        for share, real in self.deal.shares(batches, head):
            if held is not None:
                yield held
            number += 1
            held = share[0] if self.single else share
            if real != COMPLETE:
                progress.padded[number] = real
        progress.total = number
        if held is not None:
            yield held


class ShardedIterable(IterableDataset[Any]):
    """A reader's share of an iterable dataset: reads all of it, keeps every readers-th batch.

    Yields (samples of a batch, real samples in its round); collated by `ShareCollate`.
    """

    def __init__(self, dataset: IterableDataset[Any], deal: Deal, batch_size: int) -> None:
        self.dataset, self.deal, self.batch_size = dataset, deal, batch_size

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        head, samples = opening(self.dataset, self.deal.wanted, 0)
        return self.deal.shares(cut(samples, self.batch_size, drop_last=self.deal.drop_last), head)


@frozen
class ShareCollate:
    """Collates the samples of a share as the user's loader would, and passes their real number on."""

    collate: Callable[[Any], Any]
    single: bool

    def __call__(self, share: tuple[Any, int]) -> tuple[Any, int]:
        samples, real = share
        return self.collate(samples[0] if self.single else samples), real


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
