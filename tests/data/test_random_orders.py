"""Data of the user's own that draw their order from the process's streams go on in that order."""

from __future__ import annotations

import itertools
import json
import logging
import random

import numpy as np
import pytest
import torch
from reader_worlds import Numbers, Stream, plain, prepared, real, rng_state, rounds, set_rng_state
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

LENGTH = 12


def shuffled_by_python(length):
    order = list(range(length))
    random.shuffle(order)
    return order


ORDERS = {
    "torch": lambda length: torch.randperm(length).tolist(),
    "numpy": lambda length: np.random.permutation(length).tolist(),  # noqa: NPY002 - the global stream
    "python": shuffled_by_python,
    "plain": lambda length: list(range(length)),
}


class Drawn(IterableDataset):
    """Draws its order when an iteration begins."""

    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return iter(self.order(LENGTH))


class DrawnLate(Drawn):
    """Draws its order when its first sample is asked for."""

    def __iter__(self):
        yield from self.order(LENGTH)


class DrawnAlong(Drawn):
    """Draws while it is read."""

    def __iter__(self):
        left = list(range(LENGTH))
        while left:
            yield left.pop(self.order(len(left))[0])


class OrderSampler(Sampler):
    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return iter(self.order(LENGTH))

    def __len__(self):
        return LENGTH


class OrderBatches(BatchSampler):
    def __init__(self, order):
        super().__init__(SequentialSampler(range(LENGTH)), 2, drop_last=False)
        self.order = order

    def __iter__(self):
        order = self.order(LENGTH)
        return (order[start : start + 2] for start in range(0, LENGTH, 2))


DATA = {
    "iterable": lambda order: DataLoader(Drawn(order), 2, collate_fn=plain),
    "iterable late": lambda order: DataLoader(DrawnLate(order), 2, collate_fn=plain),
    "sampler": lambda order: DataLoader(Numbers(LENGTH), 2, sampler=OrderSampler(order), collate_fn=plain),
    "batches": lambda order: DataLoader(Numbers(LENGTH), batch_sampler=OrderBatches(order), collate_fn=plain),
}


def seed(number):
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global stream
    torch.manual_seed(number)


def saved(loader):
    """What a checkpoint holds."""
    return json.loads(json.dumps(loader.state_dict())), rng_state()


def resumed(make, state):
    seed(99)
    (loader,) = prepared(make)
    loader.load_state_dict(state[0])
    set_rng_state(state[1])
    return loader


def dropout():
    return random.random(), float(np.random.rand()), torch.rand(()).item()  # noqa: NPY002 - the global stream


def train(loader, until=None):
    """Batches, with numbers drawn beside each as a training step does."""
    return [(batch, dropout()) for batch in itertools.islice(loader, until)]


@pytest.mark.parametrize("done", range(1, 13))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("data", DATA)
def test_a_resumed_epoch_goes_on_in_its_order_and_leaves_the_streams_where_they_were(data, order, done):
    def make(_=None):
        return DATA[data](ORDERS[order])

    seed(3)
    (loader,) = prepared(make)
    whole = [*train(loader), *train(loader), *train(loader)]
    seed(3)
    (loader,) = prepared(make)
    steps = [] if done <= LENGTH // 2 else train(loader)
    iterator = iter(loader)
    steps += train(iterator, done - len(steps))
    again = resumed(make, saved(loader))
    while len(steps) < len(whole):
        steps += train(again)
    assert steps == whole


def test_a_position_between_the_start_of_an_epoch_and_its_first_batch_goes_on_from_there():
    def make(_=None):
        return DATA["iterable"](ORDERS["torch"])

    seed(3)
    (loader,) = prepared(make)
    iterator = iter(loader)
    state = saved(loader)
    expected = [*iterator], [*loader]
    again = resumed(make, state)
    assert ([*again], [*again]) == expected


def test_orders_of_two_loaders_that_begin_together_are_each_their_own():
    def pair():
        return [prepared(lambda _: DATA["iterable late"](ORDERS["torch"]))[0] for _ in range(2)]

    seed(3)
    both = pair()
    pairs = zip(*both, strict=True)
    next(pairs), next(pairs)
    states, streams = [json.loads(json.dumps(each.state_dict())) for each in both], rng_state()
    expected = list(pairs)
    seed(99)
    again = pair()
    for each, state in zip(again, states, strict=True):
        each.load_state_dict(state)
    set_rng_state(streams)
    assert list(zip(*again, strict=True)) == expected


def test_an_order_drawn_from_the_loaders_generator_goes_on():
    def make(number):
        generator = torch.Generator().manual_seed(number)
        data = DrawnLate(lambda length: torch.randperm(length, generator=generator).tolist())
        return DataLoader(data, 2, generator=generator, collate_fn=plain)

    (loader,) = prepared(lambda _: make(3))
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = saved(loader)
    expected = list(iterator), list(loader)
    again = resumed(lambda _: make(4), state)
    assert (list(again), list(again)) == expected


@pytest.mark.parametrize("dispatches", [False, True])
@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_datasets_order_goes_on_at_another_number_of_readers(old, new, workers, dispatches):
    def make(_=None):
        return DataLoader(
            DrawnLate(ORDERS["torch"] if workers or dispatches else ORDERS["plain"]),
            2,
            collate_fn=plain,
            num_workers=workers,
        )

    if workers and not dispatches and old > 1:
        pytest.skip("readers with workers of different seeds")
    options = {"dispatch_batches": dispatches}
    seed(3)
    before = prepared(make, old, **options)
    found, _ = rounds(before, 1)
    state = json.loads(json.dumps(before[0].state_dict()))
    seed(99)
    after = prepared(make, new, **options)
    for loader in after:
        loader.load_state_dict(state)
    rest = real(rounds(after)[0])
    assert sorted(real(found) + rest) == list(range(LENGTH))


def test_an_order_drawn_while_it_is_read_goes_on_where_nothing_else_draws():
    def make(_=None):
        return DataLoader(DrawnAlong(ORDERS["python"]), 2, collate_fn=plain)

    seed(3)
    (loader,) = prepared(make)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = saved(loader)
    expected = list(iterator), list(loader)
    again = resumed(make, state)
    assert (list(again), list(again)) == expected


class SamplerAlong(OrderSampler):
    """Draws while it is read."""

    def __iter__(self):
        return iter(DrawnAlong(self.order))


def of_a_dataset(order):
    return DataLoader(DrawnAlong(order), 2, collate_fn=plain)


def of_a_sampler(order):
    return DataLoader(Numbers(LENGTH), 2, sampler=SamplerAlong(order), collate_fn=plain)


@pytest.mark.parametrize(("load", "who"), [(of_a_dataset, "DrawnAlong"), (of_a_sampler, "SamplerAlong")])
@pytest.mark.parametrize("order", ["torch", "numpy", "python"])
def test_an_order_drawn_among_draws_of_the_training_is_warned_of(order, load, who, caplog):
    def make(_=None):
        return load(ORDERS[order])

    seed(3)
    (loader,) = prepared(make)
    train(loader, 3)
    again = resumed(make, saved(loader))
    with caplog.at_level(logging.WARNING):
        next(iter(again))
    assert f"{who} draws from the random stream {order} while it is read" in caplog.text


@pytest.mark.parametrize(("old", "new"), [(0, 1), (1, 0)])
def test_another_number_of_workers_is_warned_of(old, new, caplog):
    def make(workers):
        return prepared(lambda _: DataLoader(Stream(LENGTH), 2, collate_fn=plain, num_workers=workers))[0]

    loader = make(old)
    next(iter(loader))
    with caplog.at_level(logging.WARNING):
        make(new).load_state_dict(loader.state_dict())
    assert "no random state that this epoch was begun with" in caplog.text


class Unseeded(Drawn):
    """Draws its order from a generator that no checkpoint holds."""

    def __iter__(self):
        order = list(range(LENGTH))
        random.Random(self.order(LENGTH)).shuffle(order)
        yield from order


def texts(batch):
    return [str(each) for each in batch]


BEGINS_OTHERWISE = "read again, does not begin with the batch that epoch 0 began with before the checkpoint"


@pytest.mark.parametrize("dispatches", [False, True])
@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [plain, texts, None])
def test_an_order_of_a_generator_that_is_not_saved_is_warned_of(
    collate, workers, readers, dispatches, caplog
):
    seeds = itertools.count()

    def make(_=None):
        number = next(seeds)
        return DataLoader(Unseeded(lambda _: number), 2, collate_fn=collate, num_workers=workers)

    before = prepared(make, readers, dispatch_batches=dispatches)
    iterators = [iter(loader) for loader in before]
    for each in iterators:
        next(each)
    states = [saved(loader)[0] for loader in before]
    caplog.set_level(logging.WARNING)
    for loader, state in zip(prepared(make, readers, dispatch_batches=dispatches), states, strict=True):
        loader.load_state_dict(state)
        next(iter(loader))
    assert caplog.text.count(f"Unseeded, {BEGINS_OTHERWISE}") == (1 if dispatches else readers)


class Augmented(IterableDataset):
    """Numbers, with noise drawn for each."""

    def __iter__(self):
        for number in range(LENGTH):
            yield number + random.random() + torch.rand(()).item()


@pytest.mark.parametrize("dispatches", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("old", "new"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_data_that_begin_as_before_are_not_warned_of(old, new, workers, dispatches, caplog):
    def make(_=None):
        return DataLoader(Augmented(), 2, num_workers=workers)

    if workers and old != new:
        pytest.skip("refused: several workers share out their own streams")
    seed(3)
    before = prepared(make, old, dispatch_batches=dispatches)
    iterators = [iter(loader) for loader in before]
    for each in iterators:
        next(each)
    state, streams = saved(before[0])
    seed(99)
    after = prepared(make, new, dispatch_batches=dispatches)
    set_rng_state(streams)
    caplog.set_level(logging.WARNING)
    for loader in after:  # each of another world begins with what rank 0 has saved
        loader.load_state_dict(state)
        next(iter(loader), None)
    assert BEGINS_OTHERWISE not in caplog.text


def test_numbers_tell_a_batch_and_text_only_where_there_are_none(caplog):
    def make(folder, first):
        rows = [{"path": f"{folder}/{number}", "number": number} for number in range(first, LENGTH)]
        (loader,) = prepared(lambda _: DataLoader(Drawn(lambda _: rows), 2))
        return loader

    loader = make("here", 0)
    next(iter(loader))
    caplog.set_level(logging.WARNING)
    for folder, first, warns in (("there", 0, False), ("here", 1, True)):
        again = make(folder, first)
        again.load_state_dict(saved(loader)[0])
        next(iter(again))
        assert (BEGINS_OTHERWISE in caplog.text) is warns


@pytest.mark.filterwarnings("ignore:.*(quantize|invariant)")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["quantized", "sparse", "nested"])
def test_a_batch_may_hold_tensors_of_any_kind(kind, workers, caplog):
    made = {
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "sparse": lambda: torch.ones(2).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    }[kind]

    def make(_=None):
        return DataLoader(Drawn(lambda _: [made()] * 4), 2, collate_fn=plain, num_workers=workers)

    (loader,) = prepared(make)
    next(iter(loader))
    caplog.set_level(logging.WARNING)
    (again,) = prepared(make)
    again.load_state_dict(saved(loader)[0])
    assert len(next(iter(again))) == 2
    assert BEGINS_OTHERWISE not in caplog.text
