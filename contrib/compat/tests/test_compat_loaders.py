"""Dataloaders that programs make by hand from Accelerate's classes and functions."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.state import GradientState
from peers import needs_accelerate, said
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

BOTH = pytest.mark.parametrize("cls", [DataLoaderShard, DataLoaderDispatcher])


class Counting(torch.utils.data.Sampler):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16

    def __iter__(self):
        return iter(range(16))


@BOTH
def test_the_last_batch_is_known_in_each_epoch(cls):
    loader = cls(list(range(10)), batch_size=4)
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert loader.iteration == 2


@BOTH
def test_the_gradient_state_sees_the_loader_and_forgets_it_on_break(cls):
    loader = cls(list(range(10)), batch_size=4)
    for _ in loader:
        assert GradientState().active_dataloader is loader
        assert GradientState().remainder in (2, -1)
        break
    assert not GradientState().in_dataloader


class InShards(IterableDataset):
    """As an iterable of the datasets library."""

    n_shards = 4

    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(self.numbers)

    def shard(self, num_shards, index):
        size = len(self.numbers) // num_shards
        return InShards(self.numbers[index * size : (index + 1) * size])


@pytest.mark.parametrize(("split", "expected"), [(False, [[4, 5], [6, 7]]), (True, [[1], [3], [5], [7]])])
def test_a_dataset_in_shards_gives_shards_unless_batches_are_split(split, expected):
    plain = DataLoader(InShards([*range(8)]), batch_size=2)
    loader = prepare_data_loader(
        plain,
        num_processes=2,
        process_index=1,
        split_batches=split,
        dispatch_batches=False,
        put_on_device=False,
    )
    assert [batch.tolist() for batch in loader] == expected


@BOTH
def test_an_epoch_is_told_to_the_sampler_and_kept_by_what_skips(cls):
    sampler = Counting()
    loader = cls(list(range(16)), batch_sampler=torch.utils.data.BatchSampler(sampler, 4, False))
    loader.set_epoch(3)
    assert (loader.iteration, sampler.epoch) == (3, 3)

    shorter = skip_first_batches(loader, 2)
    assert [batch.tolist() for batch in shorter] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert sampler.epoch == 3


@BOTH
def test_it_counts_as_a_dataloader_and_can_be_sent_to_a_process(cls):
    loader = pickle.loads(pickle.dumps(cls(list(range(4)), batch_size=2)))

    assert isinstance(loader, DataLoader)
    assert isinstance(loader, cls)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("cls", [DataLoaderShard, DataLoaderDispatcher, SkipDataLoader])
def test_a_stateful_one_goes_on_where_its_state_was_taken(cls):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = cls(list(range(16)), batch_size=4, use_stateful_dataloader=True)
    assert isinstance(loader, stateful.StatefulDataLoader)
    for number, _ in enumerate(loader):
        if number == 1:
            state = loader.state_dict()
            break
    again = cls(list(range(16)), batch_size=4, use_stateful_dataloader=True)
    again.load_state_dict(state)

    assert [batch.tolist() for batch in again] == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_batches_without_a_size_stay_single():
    class Single(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(3))

    loader = prepare_data_loader(DataLoader(Single(), batch_size=None))
    assert [batch.item() for batch in loader] == [0, 1, 2]


BATCHES = """
import json, torch
from torch.utils.data import DataLoader, IterableDataset
from accelerate import Accelerator

class Batches(IterableDataset):
    def __iter__(self):
        return iter(made)

made = [torch.tensor([2 * number, 2 * number + 1]) for number in range(5)]
accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(DataLoader({dataset}, batch_size=None))
print(json.dumps([accelerator.gather_for_metrics(batch).tolist() for batch in loader]))
"""


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("dataset", ["made", "Batches()"])
def test_metrics_are_over_all_samples_of_batches_that_the_dataset_makes(dataset, processes, run_processes):
    found = said(run_processes, BATCHES.format(dataset=dataset), ours=True, processes=processes)
    assert [sample for batch in found for sample in batch] == list(range(10))


@needs_accelerate
def test_metrics_of_batches_that_an_iterable_dataset_makes_are_as_there(run_processes):
    code = BATCHES.format(dataset="Batches()")
    assert said(run_processes, code, ours=True, processes=2) == said(
        run_processes, code, ours=False, processes=2
    )


def test_dispatching_needs_a_device():
    with pytest.raises(ValueError, match="requires `put_on_device=True`"):
        prepare_data_loader(DataLoader([1]), dispatch_batches=True)


def test_two_processes_get_what_the_first_one_reads(tmp_path: Path, monkeypatch, run_processes):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    code = """
import json
from torch.utils.data import DataLoader
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object

state = PartialState(cpu=True)
loader = prepare_data_loader(DataLoader(range(13), batch_size=2), dispatch_batches=True, put_on_device=True)
mine = [(batch.tolist(), loader.end_of_dataloader, loader.remainder) for batch in loader]
everyones = gather_object([mine])
if state.is_main_process:
    print(json.dumps([len(loader), *everyones]))
"""
    length, first, second = said(run_processes, code, ours=True, processes=2)

    assert length == 4
    assert [batch for batch, _, _ in first] == [[0, 1], [4, 5], [8, 9], [12]]
    assert [batch for batch, _, _ in second] == [[2, 3], [6, 7], [10, 11], [0]]
    assert [(last, remainder) for _, last, remainder in first][-1] == (True, 1)


@needs_accelerate
@pytest.mark.parametrize("shares", ["batch_size=3", "batch_size=4, drop_last=True"])
@pytest.mark.by_default
def test_two_processes_train_on_accelerates_order_if_a_variable_asks_for_it(
    tmp_path: Path, monkeypatch, shares, run_processes
):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_COMPAT_ORDER", "accelerate")
    code = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

class Noisy(Dataset):
    def __len__(self):
        return 17

    def __getitem__(self, index):
        return torch.full((4,), index) + torch.rand(4)

set_seed(5)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = DataLoader(Noisy(), shuffle=True, SHARES)
other = DataLoader(Noisy(), shuffle=True, SHARES)
model, optimizer, loader, other = accelerator.prepare(model, optimizer, loader, other)
losses = []
for epoch in range(2):
    for batches in (loader, other):
        for batch in batches:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
everyones = gather_object([losses])
if accelerator.is_main_process:
    print(json.dumps(everyones))
""".replace("SHARES", shares)

    assert said(run_processes, code, ours=True, processes=2) == said(
        run_processes, code, ours=False, processes=2
    )


def test_a_batch_sampler_that_drops_the_rest_has_a_full_last_batch():
    accelerator = Accelerator()
    batches = BatchSampler(RandomSampler(range(10)), 4, drop_last=True)
    loader = accelerator.prepare(DataLoader(list(range(10)), batch_sampler=batches))
    seen = [(len(accelerator.gather_for_metrics(b)), accelerator.gradient_state.remainder) for b in loader]

    assert seen == [(4, -1), (4, -1)]
