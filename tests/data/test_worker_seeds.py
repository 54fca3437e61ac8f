"""Random numbers drawn in DataLoader workers, before and after a resume."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from reader_worlds import Numbers, Stream, plain, prepared, rounds
from torch.utils.data import DataLoader


def drawn():
    numpys = float(np.random.rand())  # noqa: NPY002 - the generator that torch seeds in workers
    return random.random(), numpys, torch.rand(()).item()


class Augmented(Numbers):
    def __getitem__(self, index):
        return (index, *drawn())


class Noisy(Stream):
    def __iter__(self):
        return ((each, *drawn()) for each in range(self.length))


def resumed(data, persistent=False):
    """(what was left of the epoch and all of the next one, the same after a resume)."""

    def make():
        torch.manual_seed(3)
        user = DataLoader(data, 2, num_workers=2, collate_fn=plain, persistent_workers=persistent)
        return prepared(lambda _: user)[0]

    loader = make()
    list(loader)
    iterator = iter(loader)
    before = [next(iterator) for _ in range(3)]
    state, stream = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
    expected = list(iterator), list(loader)
    again = make()
    torch.manual_seed(77)
    again.load_state_dict(state)
    torch.set_rng_state(stream)
    return before, expected, (list(again), list(again))


def test_iterable_datasets_repeat_their_random_numbers():
    _, expected, found = resumed(Noisy(14))
    assert found == expected


def test_map_style_data_draws_anew_from_the_epochs_seed_and_as_ever_from_the_next_epoch_on():
    before, (rest, following), (rest_again, following_again) = resumed(Augmented(14))
    assert [[index for index, *_ in batch] for batch in rest_again] == [
        [index for index, *_ in batch] for batch in rest
    ]
    assert following_again == following
    # Two workers, three batches gone: the first two draw what these drew at the epoch's start.
    assert [numbers for _, *numbers in rest_again[0]] == [numbers for _, *numbers in before[0]]


def test_plain_pytorch_draws_the_same():
    def batches(prepare):
        torch.manual_seed(5)
        return list(prepare(DataLoader(Augmented(8), 2, num_workers=2, collate_fn=plain)))

    assert batches(lambda loader: prepared(lambda _: loader)[0]) == batches(lambda loader: loader)


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


def test_an_epoch_that_is_named_before_the_first_loop_finds_no_seed_of_workers_drawn():
    def make():
        user = DataLoader(
            Numbers(8), 2, shuffle=True, num_workers=1, collate_fn=plain, persistent_workers=True
        )
        return prepared(lambda _: user)[0]

    torch.manual_seed(3)
    loader = make()
    loader.set_epoch(3)
    state, random = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
    expected = list(loader), torch.get_rng_state().tolist()

    again = make()
    again.load_state_dict(state)
    torch.set_rng_state(random)
    assert (list(again), torch.get_rng_state().tolist()) == expected
