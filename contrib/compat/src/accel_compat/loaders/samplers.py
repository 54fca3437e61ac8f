"""Samplers and datasets for one process's share of the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler seeded by a seed plus the epoch, which each iteration advances."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(device=torch.get_default_device())
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set which epoch comes next."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """One process's share of a batch sampler: one batch per round, or a part of each.

    With `even_batches` all processes get equally many samples: the last round is filled up with samples
    from the beginning.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        # BatchSampler.__init__ needs a sampler of single samples, which does not exist here.
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ValueError(
                f"To use `BatchSamplerShard` in `split_batches` mode, the batch size ({self.batch_size}) "
                f"needs to be a round multiple of the number of processes ({num_processes})."
            )

    @property
    def total_length(self) -> int:
        """Batches of all processes."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split_batches:
            return total
        whole, left = divmod(total, self.num_processes)
        if self.drop_last or not left:
            return whole
        return whole + int(self.even_batches or self.process_index < left)

    def __iter__(self) -> Iterator[Any]:
        return self._parts() if self.split_batches else self._batches()

    def _parts(self) -> Iterator[Any]:
        size = self.batch_size // self.num_processes
        mine = slice(size * self.process_index, size * (self.process_index + 1))
        first, batch = None, []
        for batch in self.batch_sampler:
            first = batch if first is None else first
            if len(batch) == self.batch_size:
                yield batch[mine]
        if self.drop_last or not first or len(batch) == self.batch_size:
            return
        if self.even_batches:
            batch = [*batch, *islice(cycle(first), self.batch_size - len(batch))]
        if batch[mine]:
            yield batch[mine]

    def _batches(self) -> Iterator[Any]:
        begun: list[Any] = []
        waiting: list[Any] = []
        for batch in self.batch_sampler:
            if len(begun) < self.num_processes:
                begun.append(batch)
            waiting.append(batch)
            if len(waiting) == self.num_processes and self.batch_size in (None, len(batch)):
                yield waiting[self.process_index]
                waiting = []
        if waiting and not self.drop_last:
            if self.even_batches:
                waiting = self._filled(waiting, begun)
            yield from waiting[self.process_index : self.process_index + 1]

    def _filled(self, batches: list[Any], begun: list[Any]) -> list[Any]:
        """Fill up a round with the first samples, or the first batches if without size."""
        missing = self.num_processes - len(batches)
        if self.batch_size is None:
            return [*batches, *islice(cycle(begun), missing)]
        samples = cycle(chain.from_iterable(begun))
        last = [*batches[-1], *islice(samples, self.batch_size - len(batches[-1]))]
        more = [list(islice(samples, self.batch_size)) for _ in range(missing)]
        return [*batches[:-1], last, *more]


class IterableDatasetShard(IterableDataset[Any]):
    """One process's share of an iterable dataset.

    The first samples fill up the last round.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"To use `IterableDatasetShard` in `split_batches` mode, the batch size ({batch_size}) "
                f"needs to be a round multiple of the number of processes ({num_processes})."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to the dataset."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        share = len(self.dataset) / (self.batch_size * self.num_processes)
        return (math.floor(share) if self.drop_last else math.ceil(share)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        size = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        part = size // self.num_processes
        mine = slice(part * self.process_index, part * (self.process_index + 1))
        samples, first = iter(self.dataset), None
        while found := list(islice(samples, size)):
            first = found if first is None else first
            if len(found) < size:
                if self.drop_last:
                    return
                found += islice(cycle(first), size - len(found))
            yield from found[mine]


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Batches before any is skipped."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler that gives a dataloader its samples."""
    batches = dataloader.batch_sampler
    return getattr(getattr(batches, "batch_sampler", batches), "sampler", dataloader.sampler)
