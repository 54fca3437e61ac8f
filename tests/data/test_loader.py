"""A prepared loader: plain PyTorch in one process, one global order in a world of readers."""

from __future__ import annotations

import itertools
import operator
import random
from itertools import chain, islice

import pytest
import torch
from reader_worlds import Numbers, Ragged, Stream, numbers, plain, prepared, real, rounds, world
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from accel_core import ConfigError, RunConfig, skip_first_batches
from accel_core.data import loader as loader_module
from accel_core.data import prefetch
from accel_core.data.loader import PreparedLoader, prepare_loader


def loaders_in_use():
    """Kinds of DataLoader that people write, as functions of a generator."""
    data = Numbers(23)

    def sampled(sampler):
        return DataLoader(data, batch_size=4, sampler=sampler, collate_fn=plain)

    def cut(sampler, generator):
        batches = BatchSampler(sampler, 4, drop_last=False)
        return DataLoader(data, batch_sampler=batches, generator=generator, collate_fn=plain)

    return {
        "sequential": lambda g: DataLoader(data, batch_size=4, generator=g, collate_fn=plain),
        "shuffled": lambda g: DataLoader(data, batch_size=4, shuffle=True, generator=g, collate_fn=plain),
        "drop_last": lambda g: DataLoader(
            data, batch_size=4, shuffle=True, drop_last=True, generator=g, collate_fn=plain
        ),
        "replacement": lambda g: sampled(RandomSampler(data, replacement=True, num_samples=70, generator=g)),
        "subset": lambda g: sampled(SubsetRandomSampler(range(3, 20), generator=g)),
        "weighted": lambda g: sampled(WeightedRandomSampler([1.0] * 23, 30, generator=g)),
        "own batches": lambda g: DataLoader(data, batch_sampler=Ragged(23), generator=g, collate_fn=plain),
        "torch's batches": lambda g: cut(RandomSampler(data, generator=g), g),
        "torch's batches, weighted": lambda g: cut(WeightedRandomSampler([1.0] * 9, 30, generator=g), g),
        "not batched": lambda g: DataLoader(data, shuffle=True, batch_size=None, generator=g),
        "iterable": lambda g: DataLoader(Stream(23), batch_size=4, generator=g, collate_fn=plain),
    }


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("kind", loaders_in_use())
def test_one_process_sees_what_plain_pytorch_sees(kind, own_generator):
    def epochs(prepare):
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(5) if own_generator else None
        loader = prepare(loaders_in_use()[kind](generator))
        found = [list(loader) for _ in range(3)]
        state = None if generator is None else generator.get_state().tolist()
        return found, torch.get_rng_state().tolist(), state

    assert epochs(lambda loader: prepared(lambda _: loader)[0]) == epochs(lambda loader: loader)


def test_epochs_reshuffle_by_themselves():
    (loader,) = prepared(numbers(20, seed=1))
    first, second = list(loader), list(loader)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(20))


@pytest.mark.parametrize("kind", ["shuffled", "subset", "weighted", "replacement"])
@pytest.mark.parametrize("own_generator", [False, True])
def test_all_readers_share_one_order_in_every_epoch(kind, own_generator):
    def make(reader):
        return loaders_in_use()[kind](torch.Generator().manual_seed(reader) if own_generator else None)

    torch.manual_seed(3)
    (alone,) = prepared(make)
    expected = real(rounds([alone])[0])
    torch.manual_seed(3)
    readers = prepared(make, readers=3)
    assert real(rounds(readers)[0]) == expected
    following = real(rounds(readers)[0])
    assert len(following) == len(expected)
    assert following != expected


class Chunks(Sampler):
    """Shuffles chunk by chunk, each when it is reached."""

    def __init__(self, length, size):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __iter__(self):
        for start in range(0, self.length, self.size):
            yield from (start + torch.randperm(self.size)).tolist()


def test_readers_share_an_order_that_is_drawn_while_it_is_read():
    """Reader 0 and reader 1 draw here from one stream, in turns: dropout on each rank does no less."""

    def make(reader):
        return DataLoader(Numbers(24), batch_size=2, sampler=Chunks(24, 8), collate_fn=plain)

    loaders = prepared(make, readers=2)
    for _ in range(2):
        found = []
        for batches, _, _ in rounds(loaders)[0]:
            found += chain(*batches)
        assert sorted(found) == list(range(24))


def test_ranks_keep_their_own_default_stream():
    torch.manual_seed(1)
    first, second = prepared(lambda _: loaders_in_use()["subset"](None), readers=2)
    list(first)
    torch.rand(3)
    before = torch.get_rng_state()
    iterator = iter(second)
    torch.set_rng_state(before)  # making the iterator draws the workers' seed, as in torch
    next(iterator)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("kind", ["shuffled", "subset", "weighted", "replacement"])
def test_the_seedable_sampler_shuffles_by_seed_and_epoch(kind, own_generator):
    def loader_of(seed, data_seed):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed) if own_generator else None
        options = {"use_seedable_sampler": True, "data_seed": data_seed}
        return prepared(lambda _: loaders_in_use()[kind](generator), **options)[0]

    one, two = loader_of(1, 11), loader_of(2, 11)
    epochs = [list(one), list(one)]
    two.set_epoch(1)
    assert list(two) == epochs[1] != epochs[0]
    assert list(loader_of(1, 12)) != epochs[0]


@pytest.mark.parametrize("kind", loaders_in_use())
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_last_is_true_exactly_while_the_last_batch_is_held(kind, readers):
    found, _ = rounds(loaders := prepared(lambda _: loaders_in_use()[kind](None), readers=readers))
    assert [last for _, _, last in found] == [[False] * readers] * (len(found) - 1) + [[True] * readers]
    assert not any(loader.last for loader in loaders)


def test_last_is_exact_on_readers_that_end_early():
    found, _ = rounds(prepared(numbers(6, 2), readers=2, even_batches=False))
    assert [(batches, last) for batches, _, last in found] == [
        ([[0, 1], [2, 3]], [False, True]),
        ([[4, 5], None], [True, False]),
    ]


def test_last_does_not_trust_a_sampler_that_misstates_its_length():
    class Liar(Ragged):
        def __len__(self):
            return 2

    (loader,) = prepared(lambda _: DataLoader(Numbers(9), batch_sampler=Liar(9), collate_fn=plain))
    assert [loader.last for _ in loader] == [False, False, False, False, True]


def test_a_sampler_without_length_can_be_dealt():
    readers = prepared(
        lambda _: DataLoader(Numbers(9), 2, sampler=iter(range(9)), collate_fn=plain), readers=2
    )
    found, _ = rounds(readers)
    assert real(found) == list(range(9))
    with pytest.raises(TypeError):
        len(readers[0])


@pytest.mark.parametrize("length", [0, 1])
def test_datasets_shorter_than_the_world(length):
    found, _ = rounds(readers := prepared(numbers(length), readers=4))
    assert [len(loader) for loader in readers] == [length] * 4
    assert [batches for batches, _, _ in found] == [[[0, 0]] * 4] * length
    assert real(found) == list(range(length))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("length", [12, 13])
def test_iterable_datasets_are_shared_out_exactly(length, workers):
    def make(_):
        return DataLoader(Stream(length), batch_size=2, collate_fn=plain, num_workers=workers)

    found, _ = rounds(prepared(make, readers=3))
    # torch runs a whole copy of the dataset in each worker, as it does without us.
    assert sorted(real(found)) == sorted(list(range(length)) * max(workers, 1))
    assert {len(batch) for batches, _, _ in found for batch in batches} == {2}


class Part(Stream):
    """A dataset that its workers divide between them, in torch's documented way."""

    start = 0

    def __iter__(self):
        return iter(range(self.start, self.length))


def divide(worker):
    info = torch.utils.data.get_worker_info()
    half = info.dataset.length // info.num_workers
    info.dataset.start, info.dataset.length = worker * half, (worker + 1) * half


def test_workers_may_divide_an_iterable_dataset_between_them():
    def make(_):
        return DataLoader(Part(20), batch_size=2, collate_fn=plain, num_workers=2, worker_init_fn=divide)

    found, _ = rounds(prepared(make, readers=2))
    assert sorted(real(found)) == list(range(20))


def test_an_iterable_without_a_batch_size_deals_its_items():
    found, _ = rounds(prepared(lambda _: DataLoader(Stream(5), batch_size=None), readers=2))
    assert [batches for batches, _, _ in found] == [[0, 1], [2, 3], [4, 0]]


def test_a_collate_function_that_is_set_later_collates_all_batches():
    loaders = prepared(lambda _: DataLoader(Stream(10), 2, collate_fn=plain), 2, dispatch_batches=False)
    for loader in loaders:
        loader.collate_fn = lambda samples: [-sample for sample in samples]
    assert real(rounds(loaders)[0]) == [-number for number in range(10)]


def test_batches_that_are_read_ahead_are_the_users_own():
    batches = [torch.arange(4.0) + number for number in range(3)]

    class Kept(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(batches)

    (loader,) = prepared(lambda _: DataLoader(Kept(), batch_size=None))
    assert all(map(operator.is_, loader, batches))


def test_an_infinite_iterable_is_not_read_to_its_end():
    class Endless(Stream):
        def __iter__(self):
            number = 0
            while True:
                yield number
                number += 1

    found, _ = rounds(prepared(lambda _: DataLoader(Endless(0), batch_size=2), readers=2), limit=2)
    assert [last for _, _, last in found] == [[False, False], [False, False]]


def test_nested_loops_and_breaks_keep_the_innermost_loader_last():
    (run,) = world()
    outer, inner = (prepare_loader(numbers(6)(0), run) for _ in range(2))
    seen = []
    for _ in outer:
        seen.append(list(run.active_loaders))
        for _ in inner:
            seen.append(list(run.active_loaders))
            break
        seen.append(list(run.active_loaders))
    assert seen == [[outer], [outer, inner], [outer]] * 3
    assert run.active_loaders == []


def test_an_exception_in_the_loop_ends_the_iteration():
    (run,) = world()
    loader = prepare_loader(numbers(6)(0), run)

    def train():
        for _ in loader:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train()
    assert run.active_loaders == []


def test_iterators_held_by_hand_may_end_in_any_order():
    (run,) = world()
    first, second = (prepare_loader(numbers(6)(0), run) for _ in range(2))
    one, two = iter(first), iter(second)
    next(one), next(two)
    one.close()
    assert run.active_loaders == [second]
    two.close()
    assert run.active_loaders == []


def test_it_is_a_dataloader_with_the_users_attributes():
    class Theirs(DataLoader):
        def describe(self):
            return f"{len(self.dataset)} samples"

    user = Theirs(Numbers(10), batch_size=3, drop_last=True, collate_fn=plain)
    user.note = "mine"
    loader, _ = prepared(lambda _: user, readers=2)
    assert isinstance(loader, DataLoader)
    for name in (
        "dataset",
        "batch_size",
        "sampler",
        "batch_sampler",
        "collate_fn",
        "num_workers",
        "drop_last",
    ):
        assert getattr(loader, name) is getattr(user, name)
    assert (loader.note, loader.describe()) == ("mine", "10 samples")
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader)) == (6, 10, 1)
    assert list(user) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(AttributeError):
        _ = loader.nothing


def test_an_iteration_of_the_users_own_stays():
    class Doubling(DataLoader):
        def __iter__(self):
            return ([2 * number for number in batch] for batch in super().__iter__())

    _, second = prepared(lambda _: Doubling(Numbers(8), batch_size=2, collate_fn=plain), readers=2)
    assert list(second) == [[4, 6], [12, 14]]


def test_preparing_twice_is_preparing_once():
    (loader,) = prepared(numbers(4))
    assert prepare_loader(loader, world()[0]) is loader


class Seen:
    """A worker_init_fn that leaves its mark in the worker's copy of the dataset."""

    def __call__(self, worker):
        torch.utils.data.get_worker_info().dataset.length += 100 * (worker + 1)


class Marked(Numbers):
    def __getitem__(self, index):
        return index, self.length


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_the_users(persistent):
    def make(_):
        return DataLoader(
            Marked(8),
            batch_size=2,
            shuffle=True,
            num_workers=2,
            persistent_workers=persistent,
            worker_init_fn=Seen(),
            collate_fn=plain,
            generator=torch.Generator().manual_seed(1),
        )

    user, (ours,) = make(0), prepared(make)
    for _ in range(2):
        expected = list(user)
        assert list(ours) == expected
        assert {length for batch in expected for _, length in batch} == {108, 208}


def test_batches_are_moved_where_the_device_is_another(monkeypatch):
    moved = []

    def move(batch, device, non_blocking):
        moved.append((device, non_blocking))
        return [-number for number in batch]

    monkeypatch.setattr(prefetch, "send_to_device", move)
    (run,) = world(device="meta", non_blocking=True)
    assert list(prepare_loader(numbers(3)(0), run)) == [[0, -1], [-2]]
    assert moved == [(torch.device("meta"), True)] * 2
    assert list(prepare_loader(numbers(3)(0), run, device_placement=False)) == [[0, 1], [2]]


def test_each_batch_is_marked_where_the_device_marks_steps():
    points = []
    (run,) = world(mark_step=points.append)
    assert len(list(prepare_loader(numbers(3)(0), run))) == len(points)
    assert set(points) == {"batch"}


def test_a_set_epoch_of_the_users_sampler_is_called_for_each_epoch():
    class ByEpoch(RandomSampler):
        def set_epoch(self, epoch):
            told.append(epoch)

    told = []
    (loader,) = prepared(lambda _: DataLoader(Numbers(4), sampler=ByEpoch(range(4))))
    list(loader), list(loader)
    assert told == [0, 1]


@pytest.mark.parametrize("make", [numbers(9, 3), lambda _: DataLoader(Numbers(9), batch_sampler=Ragged(9))])
def test_split_batches_needs_a_batch_size_that_can_be_split(make):
    with pytest.raises(ConfigError, match="make the batch size a multiple of 2"):
        prepared(make, readers=2, split_batches=True)


class Repeated(Sampler):
    """A sampler of one rank, as several libraries have them: it is none of torch's."""

    def __init__(self, num_replicas, batches=False):
        self.num_replicas, self.batches = num_replicas, batches

    def __iter__(self):
        return iter([[0], [2]] if self.batches else [0, 2])


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": DistributedSampler(range(8), num_replicas=3, rank=0)},
        {"sampler": DistributedSampler(range(8), num_replicas=2, rank=1)},
        {"sampler": Repeated(3)},
        {"batch_sampler": Repeated(3, batches=True)},
        {"batch_size": None, "sampler": BatchSampler(Repeated(3), 2, drop_last=False)},
    ],
)
def test_a_sampler_for_other_readers_is_refused_by_name(given):
    with pytest.raises(
        ConfigError, match="takes share . of num_replicas=., but this process is reader 0 of 2"
    ):
        prepared(lambda _: DataLoader(Numbers(8), **given), readers=2)


def test_a_sampler_for_one_rank_is_not_sharded():
    (loader,) = prepared(lambda _: DataLoader(Numbers(8), 2, sampler=Repeated(1), collate_fn=plain))
    assert list(loader) == [[0, 2]]


@pytest.mark.parametrize("kind", ["prepared", "plain"])
def test_skip_first_batches_skips_once_and_keeps_every_option(kind):
    make = numbers(7, 2, drop_last=True)
    loader = prepared(make)[0] if kind == "prepared" else make(0)
    skipped = skip_first_batches(loader, 1)
    assert list(loader) == [[0, 1], [2, 3], [4, 5]]
    assert list(skipped) == [[2, 3], [4, 5]]
    assert list(skipped) == list(loader) == [[0, 1], [2, 3], [4, 5]]
    assert isinstance(skipped, type(loader) if kind == "prepared" else DataLoader)
    assert (skipped.batch_size, skipped.drop_last) == (2, True)


@pytest.mark.parametrize("kind", ["prepared", "plain"])
def test_skipping_again_leaves_more_out(kind):
    """A prepared loader left out as many as the last call said, and a plain one raised TypeError."""
    make = numbers(7, 2)
    loader = prepared(make)[0] if kind == "prepared" else make(0)
    skipped = skip_first_batches(skip_first_batches(loader, 1), 2)
    assert len(skipped) == 1
    assert (list(skipped), len(list(skipped))) == ([[6]], 4)
    assert list(skip_first_batches(skipped, 3)) == [[6]]


def test_a_loader_that_skips_already_is_refused():
    """Each reader left out as many, and no batch was the last."""
    with pytest.raises(ConfigError, match="leaves out 2 batches") as caught:
        prepared(lambda _: skip_first_batches(numbers(9, 2)(0), 2), 2)
    assert "call skip_first_batches on what prepare returns" in str(caught.value)


class Odd(DataLoader):
    """Leaves out every second batch: with attributes that are this class's own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._skip = self._skipped = True

    def __iter__(self):
        yield from islice(super().__iter__(), 1 if self._skip is self._skipped is True else 0, None, 2)


def test_a_loader_with_attributes_of_these_names_is_its_own():
    """prepare said that skip_first_batches had been called, and skip_first_batches wrote over them."""
    loader = Odd(Numbers(12), 2, collate_fn=plain)
    assert list(skip_first_batches(loader, 1)) == [[6, 7], [10, 11]]
    (loader,) = prepared(lambda _: Odd(Numbers(12), 2, collate_fn=plain))
    assert list(loader) == [[2, 3], [6, 7], [10, 11]]


def test_skipping_in_a_world_skips_rounds_and_pads_from_the_start_of_the_epoch():
    readers = [skip_first_batches(loader, 1) for loader in prepared(numbers(7, 2), readers=2)]
    found, _ = rounds(readers)
    assert [(batches, remainder) for batches, remainder, _ in found] == [([[4, 5], [6, 0]], 3)]


def test_skipped_map_style_data_is_not_read():
    class Counting(Numbers):
        def __getitem__(self, index):
            read.append(index)
            return index

    read = []
    (loader,) = prepared(lambda _: DataLoader(Counting(6), batch_size=2))
    list(skip_first_batches(loader, 2))
    assert read == [4, 5]


def test_shuffling_leaves_pythons_generator_alone():
    random.seed(3)
    state = random.getstate()
    (loader,) = prepared(numbers(8, seed=1))
    list(loader)
    assert random.getstate() == state


def test_a_prepared_loader_of_tensors_yields_what_torch_yields():
    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    (loader,) = prepared(lambda _: DataLoader(data, batch_size=4))
    assert isinstance(loader, PreparedLoader)
    for ours, theirs in zip(loader, DataLoader(data, batch_size=4), strict=True):
        assert [type(x) for x in ours] == [type(x) for x in theirs]
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("data", [Numbers(4), Stream(4)])
@pytest.mark.parametrize("readers", [1, 2])
def test_what_is_set_on_it_is_set_on_the_users_loader(data, readers):
    loader = prepared(lambda _: DataLoader(data, 2), readers, dispatch_batches=False)[0]
    loader.collate_fn = tuple
    assert next(iter(loader)) == (0, 1)


def test_an_option_of_a_loader_class_of_the_users_own_can_be_set():
    class Own(DataLoader):
        limit = 1

        def __iter__(self):
            return itertools.islice(super().__iter__(), self.limit)

    (loader,) = prepared(lambda _: Own(Numbers(4), collate_fn=plain))
    loader.limit = 3
    assert list(loader) == [[0], [1], [2]]


def test_no_random_stream_is_shared_unless_it_is_asked_for():
    assert RunConfig().rng_types == ()
    (run,) = world(rng_types=("generator",))
    assert prepare_loader(numbers(4)(0), run)._plan.synchronized == ()


def test_an_iterator_that_lives_to_the_interpreters_end_is_collected_without_a_word(monkeypatch):
    (loader,) = prepared(numbers(9))
    loop = iter(loader)
    next(loop)
    # Python clears the modules before what their functions still hold.
    for name in [name for name in vars(loader_module) if not name.startswith("__")]:
        monkeypatch.setattr(loader_module, name, None)
    loop.close()
