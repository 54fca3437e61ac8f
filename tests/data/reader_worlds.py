"""Readers of one world without processes: what a loader asks of a run, and nothing more."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from accel_core import DataLoaderConfiguration, Topology
from accel_core.data.loader import prepare_loader


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    """0, 1, 2, ... without a length."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Ragged(BatchSampler):
    """A batch sampler of the user's own: batches of 1, 2, 3, 1, 2, 3, ... samples; no batch size."""

    def __init__(self, length, drop_last=False):
        super().__init__(SequentialSampler(range(length)), 1, drop_last)
        del self.batch_size

    def batches(self):
        start, size = 0, 1
        while start < len(self.sampler):
            yield list(range(start, min(start + size, len(self.sampler))))
            start, size = start + size, size % 3 + 1

    def __iter__(self):
        return self.batches()

    def __len__(self):
        return len(list(self.batches()))


class Told:
    """Collectives of a rank that lives after rank 0: it hears what rank 0 said, and nobody else."""

    def __init__(self, rank, size, told):
        self.rank, self.size, self.told, self.heard = rank, size, told, 0

    def broadcast(self, tensor, source=0):
        if self.rank == 0:
            self.told.append(tensor.clone())
            return tensor
        self.heard += 1
        return tensor.copy_(self.told[self.heard - 1])

    def all_gather(self, tensor):
        return torch.cat([self.broadcast(tensor.clone()), *[tensor] * (self.size - 1)])


def world(readers=1, *, device="cpu", wrap=None, mark_step=None, rng_types=("generator",), **data):
    """One fake run for each reader. Readers must iterate in step, reader 0 first."""
    told, steps = [], {"wrap_dataloader": wrap}

    def run(reader):
        control = Told(reader, readers, told)
        return SimpleNamespace(
            config=SimpleNamespace(data=DataLoaderConfiguration(**data), rng_types=rng_types),
            topology=Topology(reader=reader, readers=readers),
            world=SimpleNamespace(size=1),  # nobody trains here
            device=torch.device(device),
            hooks=SimpleNamespace(step=steps.get, data_source=lambda loader, topology, already_sharded: None),
            mark_step=mark_step,
            units=[],
            active_loaders=[],
            trained_from=set(),
            observe_collective=None,
            collectives=lambda dim="world": control,
        )

    return [run(reader) for reader in range(readers)]


def plain(batch):
    """Collate to a list."""
    return list(batch)


def prepared(make, readers=1, **data):
    """A prepared loader for each reader; `make(reader)` gives the user's DataLoader."""
    return [prepare_loader(make(reader), run) for reader, run in enumerate(world(readers, **data))]


def numbers(length, batch_size=2, *, seed=None, **options):
    """make(reader) for loaders over `Numbers`; `seed`: shuffled, by a generator of each reader's own."""

    def make(reader):
        generator = None if seed is None else torch.Generator().manual_seed(seed + reader)
        return DataLoader(
            Numbers(length),
            batch_size=batch_size,
            shuffle=seed is not None,
            generator=generator,
            collate_fn=plain,
            **options,
        )

    return make


def rounds(loaders, limit=None):
    """Up to `limit` rounds of an epoch: for each, (the readers' batches, remainder, last by reader)."""
    iterators = [_lazily(loader) for loader in loaders]
    found = []
    while limit is None or len(found) < limit:
        batches = [next(iterator, None) for iterator in iterators]
        if all(batch is None for batch in batches):
            break
        found.append((batches, loaders[0].remainder, [loader.last for loader in loaders]))
    return found, iterators


def _lazily(loader):
    # Rank 0 begins, and draws, before the others do: they share this process's default generator.
    yield from loader


def real(found):
    """The samples of these rounds in order, as `gather_for_metrics` would leave them."""
    samples = []
    for batches, remainder, _ in found:
        together = [sample for batch in batches for sample in batch or ()]
        samples += together if remainder < 0 else together[:remainder]
    return samples
