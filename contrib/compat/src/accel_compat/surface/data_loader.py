"""Dataloaders and samplers: those a run prepares are accel-core's, those made by hand are here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_compat import runs
from accel_compat.refusing import NotServedError, unserved
from accel_core import PreparedLoader
from accel_core import skip_first_batches as _skip

from .utils.operations import send_to_device


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order is drawn from a seed plus the epoch, which each iteration advances."""

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
    """One process's share of a batch sampler: of each round of batches one, or of each batch a part.

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
        # Not BatchSampler.__init__: there is no sampler of single samples.
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
        """A round, filled up with the samples (or batches, where these have no size) that came first."""
        missing = self.num_processes - len(batches)
        if self.batch_size is None:
            return [*batches, *islice(cycle(begun), missing)]
        samples = cycle(chain.from_iterable(begun))
        last = [*batches[-1], *islice(samples, self.batch_size - len(batches[-1]))]
        more = [list(islice(samples, self.batch_size)) for _ in range(missing)]
        return [*batches[:-1], last, *more]


class IterableDatasetShard(IterableDataset[Any]):
    """One process's share of an iterable dataset; the last round is filled up with what came first."""

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


class _Prepared(type):
    """Lets what a run prepared count as Accelerate's classes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, PreparedLoader):
            return instance._dispatches == (cls.__name__ == "DataLoaderDispatcher")
        return super().__instancecheck__(instance)


class DataLoaderShard(DataLoader[Any], metaclass=_Prepared):
    """A DataLoader that puts batches on a device and knows its last one; `prepare` makes another."""

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        rng_types: Any = None,
        synchronized_generator: Any = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.skip_batches = skip_batches
        self.iteration = iteration
        self.non_blocking = _non_blocking
        self.end_of_dataloader, self.remainder = False, -1

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.end_of_dataloader = False
        batches = islice(super().__iter__(), self.skip_batches, None)
        held = next(batches, None)
        while held is not None:
            following = next(batches, None)
            self.end_of_dataloader = following is None
            yield held if self.device is None else send_to_device(held, self.device, self.non_blocking)
            held = following
        self.iteration += 1

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to sampler and dataset."""
        self.iteration = epoch
        for each in (self.sampler, self.dataset):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int:
        """Samples that all processes take together."""
        sampler = self.batch_sampler
        if not isinstance(sampler, BatchSamplerShard):
            return self.batch_size or 1
        return int(sampler.batch_size) * (1 if sampler.split_batches else sampler.num_processes)

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return getattr(self.dataset, "total_length", None) or len(self.dataset)  # type: ignore[arg-type]


class DataLoaderDispatcher(DataLoader[Any], metaclass=_Prepared):
    """What `prepare` makes where rank 0 reads for all ranks."""

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        raise NotServedError(
            "DataLoaderDispatcher cannot be made by hand\n"
            "prepare the DataLoader with DataLoaderConfiguration(dispatch_batches=True)"
        )


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """The sampler that gives a dataloader its samples."""
    batches = dataloader.batch_sampler
    return getattr(getattr(batches, "batch_sampler", batches), "sampler", dataloader.sampler)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: Any = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """This process's share of a dataloader, for any number of processes.

    What the run's own processes read is what `accelerator.prepare` gives.
    """
    run = runs.newest()
    count = num_processes or (1 if run is None else run.world.size)
    index = process_index if process_index is not None else (0 if run is None else run.world.rank)
    if dispatch_batches or use_stateful_dataloader:
        raise NotServedError(
            "prepare_data_loader with dispatch_batches or use_stateful_dataloader needs the run\n"
            "use accelerator.prepare(dataloader)"
        )
    kept = {name: getattr(dataloader, name) for name in _KEPT}
    place = device if put_on_device else None
    if isinstance(dataloader.dataset, IterableDataset):
        share = IterableDatasetShard(
            dataloader.dataset, dataloader.batch_size or 1, dataloader.drop_last, count, index, split_batches
        )
        size = (dataloader.batch_size or 1) // (count if split_batches else 1)
        return DataLoaderShard(
            share, place, batch_size=size, drop_last=dataloader.drop_last, _non_blocking=non_blocking, **kept
        )
    batches: Any = dataloader.batch_sampler
    if use_seedable_sampler and isinstance(batches.sampler, RandomSampler):
        seeded = SeedableRandomSampler(
            dataloader.dataset,
            replacement=batches.sampler.replacement,
            generator=batches.sampler.generator,
            data_seed=data_seed,
        )
        batches = BatchSampler(seeded, batches.batch_size, batches.drop_last)
    if count > 1:
        batches = BatchSamplerShard(batches, count, index, split_batches, even_batches)
    return DataLoaderShard(
        dataloader.dataset, place, batch_sampler=batches, _non_blocking=non_blocking, **kept
    )


_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


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


class SkipDataLoader(DataLoaderShard):
    """A dataloader without its first batches, in each epoch."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, **kwargs)

    def __len__(self) -> int:
        return super().__len__() - self.skip_batches


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The dataloader without its first batches: a prepared one in its next epoch, another in each."""
    if isinstance(dataloader, PreparedLoader):
        return _skip(dataloader, num_batches)
    kept = {name: getattr(dataloader, name) for name in _KEPT}
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(
            dataloader.dataset,
            num_batches,
            batch_size=dataloader.batch_size,
            drop_last=dataloader.drop_last,
            **kept,
        )
    batches = SkipBatchSampler(dataloader.batch_sampler, num_batches)
    if isinstance(dataloader, DataLoaderShard):
        return DataLoaderShard(dataloader.dataset, dataloader.device, batch_sampler=batches, **kept)
    return DataLoader(dataloader.dataset, batch_sampler=batches, **kept)


__getattr__ = unserved(__name__)
