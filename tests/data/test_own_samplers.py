"""Samplers of the user's own: an order is read as a whole when its epoch begins; a resume goes on in it."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from reader_worlds import Numbers, plain, prepared
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

LENGTH = 12


class AtOnce(Sampler):
    """Draws its order when an iteration begins."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(torch.randperm(LENGTH).tolist())


class Along(AtOnce):
    """Draws each index when it is asked for."""

    def __iter__(self):
        left = list(range(LENGTH))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class ByEpoch(AtOnce):
    """Draws from a generator that the epoch's number seeds."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Batches(BatchSampler):
    def __init__(self):
        super().__init__(SequentialSampler(range(LENGTH)), 2, drop_last=False)

    def __iter__(self):
        order = torch.randperm(LENGTH).tolist()
        return (order[start : start + 2] for start in range(0, LENGTH, 2))


def sampled(sampler):
    return lambda _=None: DataLoader(Numbers(LENGTH), 2, sampler=sampler(), collate_fn=plain)


LOADERS = {
    "at once": sampled(AtOnce),
    "along": sampled(Along),
    "by epoch": sampled(ByEpoch),
    "batches": lambda _=None: DataLoader(Numbers(LENGTH), batch_sampler=Batches(), collate_fn=plain),
}


def train(loader, until=None):
    """Batches, with a number drawn beside each as dropout does."""
    return [(batch, torch.rand(()).item()) for batch in itertools.islice(loader, until)]


@pytest.mark.parametrize("done", [1, 3, 6, 7, 12])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_resumed_epoch_goes_on_in_its_order_and_leaves_the_stream_where_it_was(make, done):
    torch.manual_seed(3)
    (loader,) = prepared(make)
    whole = [*train(loader), *train(loader), *train(loader)]
    torch.manual_seed(3)
    (loader,) = prepared(make)
    steps = [] if done <= LENGTH // 2 else train(loader)
    iterator = iter(loader)
    steps += train(iterator, done - len(steps))
    state, stream = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()

    torch.manual_seed(99)
    (again,) = prepared(make)
    again.load_state_dict(state)
    torch.set_rng_state(stream)
    while len(steps) < len(whole):
        steps += train(again)
    assert steps == whole


def test_nothing_is_drawn_between_the_indices_of_an_order():
    torch.manual_seed(3)
    (loader,) = prepared(LOADERS["along"])
    alone = list(loader)
    torch.manual_seed(3)
    (loader,) = prepared(LOADERS["along"])
    assert [batch for batch, _ in train(loader)] == alone


class Endless(AtOnce):
    """Goes on after its length, as samplers for training by steps do."""

    def __iter__(self):
        return itertools.count()


def test_a_sampler_may_have_no_end():
    (loader,) = prepared(sampled(Endless))
    assert list(itertools.islice(loader, 8))[-1] == [14, 15]
