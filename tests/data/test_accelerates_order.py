"""`data.order: accelerate`: random orders, and draws, as Accelerate has them on several processes."""

from __future__ import annotations

import pytest
import torch
from reader_worlds import Numbers, plain, prepared, rounds
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

SAMPLERS = {
    "random": lambda: RandomSampler(Numbers(9)),
    "subset": lambda: SubsetRandomSampler(range(9)),
    "weighted": lambda: WeightedRandomSampler([1.0] * 9, 9),
}


def shuffled(sampler="random"):
    """make(reader) for loaders that shuffle by torch's default generator."""

    def make(reader):
        return DataLoader(Numbers(9), batch_size=2, sampler=SAMPLERS[sampler](), collate_fn=plain)

    return make


def dealt(order):
    """The rounds of two readers, with batches of two; filled from the start of the order."""
    filled = [*order, *order[:3]]
    return [(filled[start : start + 2], filled[start + 2 : start + 4]) for start in range(0, len(filled), 4)]


def handed_out(loaders):
    return [tuple(batches) for batches, _, _ in rounds(loaders)[0]]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_one_seed_is_drawn_at_prepare_and_orders_follow_each_other(sampler):
    torch.manual_seed(3)
    loaders = prepared(shuffled(sampler), readers=2, order="accelerate")
    torch.manual_seed(99)  # what is drawn later changes nothing
    epochs = [handed_out(loaders) for _ in range(3)]

    torch.manual_seed(3)
    items = SAMPLERS[sampler]()
    items.generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    assert epochs == [dealt(list(items)) for _ in range(3)]


def test_one_process_draws_as_plain_pytorch_does():
    torch.manual_seed(3)
    (loader,) = prepared(shuffled(), order="accelerate")
    epochs = [list(loader) for _ in range(2)]

    torch.manual_seed(3)
    same = shuffled()(0)
    assert epochs == [list(same) for _ in range(2)]


def test_a_generator_of_the_users_own_stays():
    def make(reader):
        own = torch.Generator().manual_seed(5)
        return DataLoader(Numbers(9), 2, sampler=RandomSampler(Numbers(9), generator=own), collate_fn=plain)

    same = RandomSampler(Numbers(9), generator=torch.Generator().manual_seed(5))
    assert handed_out(prepared(make, readers=2, order="accelerate")) == dealt(list(same))


def test_a_seed_of_the_configuration_goes_before_the_processs():
    def orders(seed):
        torch.manual_seed(seed)
        options = {"order": "accelerate", "use_seedable_sampler": True, "data_seed": 7}
        return handed_out(prepared(shuffled(), readers=2, **options))

    assert orders(1) == orders(2)


class Noisy(Numbers):
    """Sample i is (i, a random number)."""

    def __getitem__(self, index):
        return index, torch.rand(()).item()


@pytest.mark.parametrize("order", ["pytorch", "accelerate"])
def test_the_next_batch_is_read_before_this_one_is_handed_out(order):
    """So that random numbers of a dataset and of the forward come in Accelerate's turns."""
    torch.manual_seed(3)
    loader = DataLoader(Noisy(4), collate_fn=plain)
    (prepared_loader,) = prepared(lambda reader: loader, order=order)
    drawn = []
    for ((_, number),) in prepared_loader:
        drawn += [number, torch.rand(()).item()]

    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()  # the loader's own seed
    stream = [torch.rand(()).item() for _ in range(8)]
    ahead = [0, 2, 1, 4, 3, 6, 5, 7]  # read 0 and 1, forward 0, read 2, forward 1, ...
    assert drawn == [stream[place] for place in (ahead if order == "accelerate" else range(8))]


def test_loaders_that_are_zipped_begin_one_after_the_other():
    torch.manual_seed(3)
    (first,) = prepared(lambda reader: DataLoader(Noisy(2), collate_fn=plain), order="accelerate")
    (second,) = prepared(lambda reader: DataLoader(Noisy(2), collate_fn=plain), order="accelerate")
    drawn = [number for pair in zip(first, second, strict=True) for ((_, number),) in pair]

    torch.manual_seed(3)
    wanted = []
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()  # the loader's own seed
        wanted.append([torch.rand(()).item() for _ in range(2)])
    assert drawn == [wanted[0][0], wanted[1][0], wanted[0][1], wanted[1][1]]


class Backwards(Sampler):
    """A sampler around another; it has no generator."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        return reversed(list(self.sampler))


def test_a_sampler_inside_the_users_own_keeps_its_generator():
    inner = RandomSampler(Numbers(9))
    prepared(
        lambda reader: DataLoader(Numbers(9), batch_size=2, sampler=Backwards(inner)), 2, order="accelerate"
    )
    assert inner.generator is None


def test_a_seedable_sampler_takes_the_seed_that_torch_has_at_prepare():
    torch.manual_seed(3)
    loaders = prepared(shuffled(), readers=2, order="accelerate", use_seedable_sampler=True)
    torch.manual_seed(99)
    same = RandomSampler(Numbers(9), generator=torch.Generator().manual_seed(3))
    assert handed_out(loaders) == dealt(list(same))


def test_a_loop_that_is_left_early_has_drawn_what_it_read():
    """torch's RandomSampler draws once more at its end, which this loop does not reach."""

    def make(reader):
        own = torch.Generator().manual_seed(5)
        return DataLoader(Numbers(40), 2, sampler=RandomSampler(Numbers(40), generator=own), collate_fn=plain)

    loaders = prepared(make, readers=2, order="accelerate")
    rounds(loaders, limit=2)

    generator = torch.Generator().manual_seed(5)
    torch.randperm(40, generator=generator)
    assert handed_out(loaders) == dealt(torch.randperm(40, generator=generator).tolist())[:10]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_goes_on_with_the_same_orders(stop):
    torch.manual_seed(3)
    loaders = prepared(shuffled(), readers=2, order="accelerate")
    handed_out(loaders)
    _, iterators = rounds(loaders, limit=stop)
    states = [loader.state_dict() for loader in loaders]
    rest = [tuple(next(iterator) for iterator in iterators) for _ in range(3 - stop)]
    wanted = [epoch for epoch in (rest, handed_out(loaders)) if epoch]

    torch.manual_seed(77)
    again = prepared(shuffled(), readers=2, order="accelerate")
    for loader, state in zip(again, states, strict=True):
        loader.load_state_dict(state)
    assert [handed_out(again) for _ in wanted] == wanted
