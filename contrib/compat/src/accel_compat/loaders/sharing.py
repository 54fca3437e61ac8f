"""Standalone dataloaders for one process's share, and skipping of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_compat.loaders.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
)
from accel_compat.loaders.standalone import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
)
from accel_compat.state.states import PartialState
from accel_core import PreparedLoader
from accel_core import skip_first_batches as _skip

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
) -> DataLoaderShard | DataLoaderDispatcher:
    """Return this process's share of a dataloader, for any number of processes.

    What the run's own processes read is what `accelerator.prepare` gives.
    """
    state = PartialState()
    count = state.num_processes if num_processes is None else num_processes
    index = state.process_index if process_index is None else process_index
    if dispatch_batches is None:
        dispatch_batches = put_on_device and isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches and not put_on_device:
        raise ValueError("Using `dispatch_batches=True` requires `put_on_device=True`.")
    options: dict[str, Any] = {name: getattr(dataloader, name) for name in _KEPT}
    options |= {"use_stateful_dataloader": use_stateful_dataloader, "_drop_last": dataloader.drop_last}
    options |= {"_non_blocking": non_blocking, "torch_device_mesh": torch_device_mesh}
    if dispatch_batches:
        options |= _read_by(dataloader, 1, 0, split_batches, even_batches)
        return DataLoaderDispatcher(split_batches=split_batches, slice_fn=slice_fn_for_dispatch, **options)
    options |= _read_by(dataloader, count, index, split_batches, even_batches)
    made = DataLoaderShard(device=device if put_on_device else None, rng_types=rng_types, **options)
    shuffled = get_sampler(dataloader)
    if use_seedable_sampler and isinstance(shuffled, RandomSampler):
        kept = {"replacement": shuffled.replacement, "generator": shuffled.generator}
        made.set_sampler(SeedableRandomSampler(shuffled.data_source, data_seed=data_seed, **kept))
    return made


def _read_by(dataloader: Any, count: int, index: int, split: bool, even: bool) -> dict[str, Any]:
    """Dataset and batches of one of `count` processes."""
    dataset: Any = dataloader.dataset
    if not isinstance(dataset, IterableDataset):
        batches = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else None
        if count == 1:
            whole = {"sampler": batches, "batch_size": None} if batches else {}
            return {"dataset": dataset, **(whole or {"batch_sampler": dataloader.batch_sampler})}
        share = BatchSamplerShard(batches or dataloader.batch_sampler, count, index, split, even)
        role = {"sampler": share, "batch_size": None} if batches else {"batch_sampler": share}
        return {"dataset": dataset, **role}
    size = dataloader.batch_size
    if count > 1 and not split and getattr(dataset, "n_shards", 0) >= count:  # of the datasets library
        dataset = dataset.shard(  # type: ignore[attr-defined]
            num_shards=count, index=index
        )
    elif count > 1:
        dataset = IterableDatasetShard(dataset, size or 1, dataloader.drop_last, count, index, split)
    cut = size // count if split and size else size
    return {"dataset": dataset, "batch_size": cut, "drop_last": dataloader.drop_last}


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return the dataloader without its first batches, in each epoch."""
    if isinstance(dataloader, PreparedLoader):
        several = dataloader.__dict__.get("_skips", 0) + num_batches
        view = _skip(dataloader, several)
        view.__dict__["_skips"] = several
        return view
    kept: dict[str, Any] = {name: getattr(dataloader, name) for name in _KEPT}
    made_by_hand = isinstance(dataloader, DataLoaderAdapter)
    if made_by_hand:
        kept |= {name: getattr(dataloader, name) for name in dataloader.options}
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDataset) or isinstance(dataloader, DataLoaderDispatcher):
        role = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        if not isinstance(dataset, IterableDataset):
            role = {"batch_sampler": dataloader.batch_sampler}
        cls = type(dataloader) if made_by_hand else SkipDataLoader
        return cls(dataset, skip_batches=num_batches, **role, **kept)
    if dataloader.batch_sampler is None:
        kept |= {"sampler": SkipBatchSampler(dataloader.sampler, num_batches), "batch_size": None}
    else:
        kept["batch_sampler"] = SkipBatchSampler(dataloader.batch_sampler, num_batches)
    return (type(dataloader) if made_by_hand else DataLoader)(dataset, **kept)
