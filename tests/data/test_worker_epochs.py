"""Workers that persist read each epoch as workers that are started for it do: `set_epoch` reaches them."""

from __future__ import annotations

import json
import logging
from itertools import islice

import pytest
from reader_worlds import plain, prepared, rounds
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

# On a machine with fewer cores torch says that they are many.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Epochs:
    """Sample i of epoch e is 100 * e + i."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def sample(self, index):
        return 100 * self.epoch + index


class ByIndex(Epochs, Dataset):
    def __getitem__(self, index):
        return self.sample(index)


class ByBatch(Epochs, Dataset):
    def __getitems__(self, indices):
        return [self.sample(index) for index in indices]


class Streamed(Epochs, IterableDataset):
    __len__ = None

    def __iter__(self):
        info = get_worker_info()
        assert info is None or info.dataset is self
        return (self.sample(index) for index in range(8))


KINDS = [ByIndex, ByBatch, Streamed]


def loaders(kind, readers=1, workers=1, **options):
    def make(_):
        options_of_workers = {"num_workers": workers, "persistent_workers": True} if workers else {}
        return DataLoader(kind(), 2, collate_fn=plain, **options_of_workers, **options)

    return prepared(make, readers, dispatch_batches=False)


def epochs(loaders, count):
    return [[batches for batches, _, _ in rounds(loaders)[0]] for _ in range(count)]


@pytest.mark.parametrize(("kind", "context"), [*((kind, "fork") for kind in KINDS), (ByIndex, "spawn")])
def test_each_epoch_is_that_of_reading_without_workers(kind, context):
    expected = [[[[100 * e + i, 100 * e + i + 1]] for i in range(0, 8, 2)] for e in range(3)]
    assert epochs(loaders(kind, multiprocessing_context=context), 3) == expected
    assert epochs(loaders(kind, workers=0), 3) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_so_is_each_readers_share(kind):
    assert epochs(loaders(kind, 2), 3) == epochs(loaders(kind, 2, workers=0), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_so_are_the_epochs_after_a_resume(kind):
    (loader,) = loaders(kind)
    list(loader)
    list(islice(loader, 2))
    state = json.loads(json.dumps(loader.state_dict()))
    (again,) = loaders(kind)
    again.load_state_dict(state)
    assert [list(again) for _ in range(2)] == [
        [[104, 105], [106, 107]],
        [[200, 201], [202, 203], [204, 205], [206, 207]],
    ]


def double(worker):
    get_worker_info().dataset.sample = lambda index: 2 * index


@pytest.mark.parametrize("set_later", [False, True])
def test_a_workers_initializer_of_the_users_own_is_called(set_later):
    options = {} if set_later else {"worker_init_fn": double}
    (loader,) = loaders(ByIndex, **options)
    if set_later:
        loader.worker_init_fn = double
    assert loader.worker_init_fn is double
    assert list(loader) == [[0, 2], [4, 6], [8, 10], [12, 14]]


@pytest.mark.needs("torchdata")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_of_torchdata_too(kind):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make(_):
        return stateful.StatefulDataLoader(
            kind(), 2, collate_fn=plain, num_workers=1, persistent_workers=True
        )

    assert epochs(prepared(make), 3) == epochs(loaders(kind, workers=0), 3)


def test_a_stream_that_keeps_its_epoch_in_shared_memory_is_left_as_it_is(caplog):
    datasets = pytest.importorskip("datasets")
    stream = (
        datasets.Dataset.from_dict({"a": list(range(16))}).to_iterable_dataset().shuffle(7, buffer_size=16)
    )

    def read(persistent_workers):
        make = DataLoader(stream, 4, num_workers=1, persistent_workers=persistent_workers)
        (loader,) = prepared(lambda _: make)
        return [[batch["a"].tolist() for batch in loader] for _ in range(3)]

    with caplog.at_level(logging.WARNING):
        found = read(True)
    assert found == read(False)
    assert found[0] != found[1]
    assert not caplog.records
