"""Random numbers drawn in DataLoader workers, before and after a resume."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from reader_worlds import Numbers, Stream, plain, prepared, rounds, world
from torch.utils.data import DataLoader

from accel_core import Topology
from accel_core.data.loader import prepare_loader


def drawn():
    numpys = float(np.random.rand())  # noqa: NPY002 - the generator that torch seeds in workers
    return random.random(), numpys, torch.rand(()).item()


class Augmented(Numbers):
    def __getitem__(self, index):
        return (index, *drawn())


class Mixed(Stream):
    """(0, number), in an order that is drawn from the worker's stream."""

    def __iter__(self):
        return iter([(0, index) for index in torch.randperm(self.length).tolist()])


def test_plain_pytorch_draws_the_same():
    def batches(prepare):
        torch.manual_seed(5)
        return list(prepare(DataLoader(Augmented(8), 2, num_workers=2, collate_fn=plain)))

    assert batches(lambda loader: prepared(lambda _: loader)[0]) == batches(lambda loader: loader)


def of_readers(data, *, share=False):
    """The epoch of two ranks that are seeded alike; `share`: they read the same samples."""
    loaders = []
    for rank, run in enumerate(world(2, dispatch_batches=False)):
        if share:
            run.topology = Topology(reader=0, readers=1)
        user = DataLoader(data, 2, num_workers=1, collate_fn=plain)
        loaders.append(prepare_loader(user, run))
        assert run.collectives("control").rank == rank
    found = []
    for loader in loaders:
        torch.manual_seed(5)
        found.append([numbers for batch in loader for _, *numbers in batch])
    return found


def test_workers_of_each_reader_draw_their_own_numbers():
    one, other = of_readers(Augmented(8))
    assert not set(map(tuple, one)) & set(map(tuple, other))


def test_workers_of_ranks_that_share_samples_draw_alike():
    one, other = of_readers(Augmented(8), share=True)
    assert one == other


def test_workers_of_readers_that_read_all_of_a_stream_draw_alike():
    """Each of them keeps its share: they must read it in one order."""
    one, other = of_readers(Mixed(8))
    assert sorted(index for (index,) in [*one, *other]) == list(range(8))


def lives(data, stop):
    """(what follows batch `stop` of three epochs with workers that persist, the same after a resume)."""

    def make():
        shuffle = None if isinstance(data, Stream) else True
        user = DataLoader(data, 2, shuffle=shuffle, num_workers=1, collate_fn=plain, persistent_workers=True)
        return prepared(lambda _: user)[0]

    def train(loader, until, keep=None):
        found = []
        while len(found) < until:
            for batch in loader:
                found.append((batch, torch.rand(()).item()))  # what the loop draws: dropout
                if len(found) == keep:
                    saved.extend((json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()))
        return found

    saved = []
    torch.manual_seed(3)
    expected = train(make(), 9, keep=stop)[stop:]
    again = make()
    torch.manual_seed(77)
    again.load_state_dict(saved[0])
    torch.set_rng_state(saved[1])
    return expected, train(again, 9 - stop)


@pytest.mark.parametrize("data", [Numbers(6), Stream(6)], ids=["map", "iterable"])
@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_workers_that_persist_draw_a_seed_once_for_all_lives_of_a_run(data, stop):
    expected, found = lives(data, stop)
    assert found == expected


def test_an_epoch_begun_instead_of_the_rest_finds_the_seed_of_workers_that_persist_drawn():
    def make():
        user = DataLoader(
            Numbers(8), 2, shuffle=True, num_workers=1, collate_fn=plain, persistent_workers=True
        )
        return prepared(lambda _: user)[0]

    torch.manual_seed(3)
    loader = make()
    next(iter(loader))  # the loop is left
    state, random = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
    expected = list(loader), torch.get_rng_state().tolist()

    again = make()
    again.load_state_dict(state)
    torch.set_rng_state(random)
    again.set_epoch(1)
    assert (list(again), torch.get_rng_state().tolist()) == expected


def test_who_follows_a_reader_whose_workers_persist_draws_what_it_draws():
    def make(_):
        return DataLoader(
            Numbers(8),
            2,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            collate_fn=plain,
            generator=torch.Generator().manual_seed(5),
        )

    reads, follows = prepared(make, 2, dispatch_batches=True)
    for _ in range(3):
        rounds([reads, follows])
        assert torch.equal(reads.generator.get_state(), follows.generator.get_state())
