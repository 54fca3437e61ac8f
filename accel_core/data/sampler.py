"""Replacements for a DataLoader's sampler, collate function and worker initializer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from torch.utils.data import get_worker_info

from accel_core.data.position import Progress
from accel_core.data.sharding import NO_PADDING, Sharding, batched
from accel_core.data.shuffling import Shuffle
from accel_core.data.stateful import Shares

if TYPE_CHECKING:
    from torch import Tensor


@define(eq=False, kw_only=True)
class ShardedSampler:
    """This reader's batches of indices, in place of a DataLoader's (batch) sampler.

    Reads one round of indices ahead, so that the last batch is known before it is fetched.

    Attributes:
        shuffle: the source of the order.
        sharding: the division of rounds between readers.
        batch_size: number of samples per batch; None if the order consists of batches already.
    """

    shuffle: Shuffle
    sharding: Sharding
    batch_size: int | None
    single: bool = False
    """True if the loader does not batch: it takes an index, not a list of indices."""
    everyone: bool = False
    """True in a process that reads for all: a round has the batches of all readers."""
    progress: Progress = field(factory=Progress, init=False)
    """The next iteration: its start is read here, and its counts are written here."""

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.progress, self.sharding)

    def __len__(self) -> int:
        items = len(self.shuffle.items)
        if self.batch_size is None:
            return self.sharding.length(items)
        return self.sharding.length(self.batches_from(0), items)

    def batches_from(self, start: int) -> int:
        """Return the number of batches of one reader from unit `start` of the order on."""
        assert self.batch_size is not None
        items = max(0, len(self.shuffle.items) - start)
        return items // self.batch_size if self.sharding.drop_last else -(-items // self.batch_size)

    def _batches(self, progress: Progress, sharding: Sharding) -> Iterator[Any]:
        head, batches = self._opened(progress, sharding)
        number = 0
        held: Sequence[Any] = ()
        everyone, single = self.everyone, self.single
        for shares, real_samples in sharding.shares(batches, head, everyone=everyone):
            number += 1
            if real_samples != NO_PADDING:
                progress.padded[number] = real_samples
            if everyone and len(shares) < sharding.readers:
                progress.readers_with_batch[number] = len(shares)
            for share in held:  # noqa: UP028  `yield from` costs twice as much in each batch
                yield share
            held = [share[0] for share in shares] if single else shares
        progress.total = number
        yield from held

    def _opened(self, progress: Progress, sharding: Sharding) -> tuple[list[Any], Iterator[Any]]:
        """Return (the items that padding is taken from, the batches of the order)."""
        size = self.batch_size
        if size is not None:
            head, items = self.shuffle.open(progress, sharding.wanted)
            return head, batched(items, size, drop_last=sharding.drop_last)
        head, batches = self.shuffle.open(progress, sharding.wanted and sharding.batches)
        return head if sharding.batch_size is None else list(chain(*head)), batches


@frozen
class ShareCollate:
    """Collate function for shares: applies the user's own to each batch of a share.

    The number of real samples is passed on.
    """

    collate: Callable[[Any], Any]
    single: bool

    def __call__(self, found: Shares) -> Shares:
        shares, real = found
        return [self.collate(samples[0] if self.single else samples) for samples in shares], real


@frozen
class ShareWorker:
    """Worker initializer that calls the user's own, which sees the user's dataset and not the share."""

    initialize: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Initialize the worker. Called in the worker, before it reads."""
        info = get_worker_info()
        assert info is not None
        # WorkerInfo.__setattr__ refuses assignments.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self.initialize is not None:
            self.initialize(worker)


@frozen(eq=False)
class EpochWorker:
    """Initializer of a persistent worker: its copy of the dataset gets each new epoch before it reads.

    Attributes:
        epoch: the loader's epoch, in shared memory.
        initialize: the user's own initializer.
    """

    epoch: Tensor
    initialize: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Initialize the worker. Called in the worker, before it reads."""
        if self.initialize is not None:
            self.initialize(worker)
        info = get_worker_info()
        assert info is not None
        kind = type(info.dataset)
        names = [name for name in ("__iter__", "__getitem__", "__getitems__") if hasattr(kind, name)]
        members = {name: _told_before(getattr(kind, name), self.epoch) for name in names}
        info.dataset.__class__ = type(kind.__name__, (kind,), {"__slots__": (), **members})


def _told_before(read: Callable[..., Any], epoch: Tensor) -> Callable[..., Any]:
    """Return a dataset's method that calls `set_epoch` first if the epoch has changed since its last call."""
    told: int | None = None

    def tell_and_read(dataset: Any, *arguments: Any) -> Any:
        nonlocal told
        if (now := int(epoch)) != told:
            told = now
            dataset.set_epoch(now)
        return read(dataset, *arguments)

    return tell_and_read
