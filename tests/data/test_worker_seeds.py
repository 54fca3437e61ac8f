"""Random numbers drawn in DataLoader workers, before and after a resume."""

from __future__ import annotations

import json
import random

import numpy as np
import torch
from reader_worlds import Numbers, Stream, plain, prepared
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
