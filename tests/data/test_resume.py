"""Going on from a saved position: any moment, another number of readers, the epochs after it too."""

from __future__ import annotations

import itertools
import json
from contextlib import closing

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reader_worlds import Numbers, Ragged, Stream, numbers, plain, prepared, real, rounds, world
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_core import CheckpointError, skip_first_batches
from accel_core.data.loader import prepare_loader


def saved(loader):
    """What a checkpoint keeps of a loader."""
    return json.loads(json.dumps(loader.state_dict()))


@st.composite
def cases(draw):
    readers, new_readers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    split = draw(st.booleans())
    size = draw(st.integers(1, 4))
    return {
        "length": draw(st.integers(1, 40)),
        "readers": (readers, new_readers),
        "batch_size": size * (12 if split else 1),
        "shuffled": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "even": draw(st.booleans()),
        "split": split,
        "seedable": draw(st.booleans()),
        "epoch": draw(st.integers(0, 2)),
        "rounds": draw(st.integers(1, 12)),
    }


@settings(deadline=None, max_examples=100)
@given(case=cases())
def test_what_was_handed_out_before_and_after_is_the_whole_order(case):
    make = numbers(
        case["length"],
        case["batch_size"],
        seed=9 if case["shuffled"] else None,
        drop_last=case["drop_last"],
    )
    options = {
        "split_batches": case["split"],
        "even_batches": case["even"],
        "use_seedable_sampler": case["seedable"],
        "data_seed": 4,
    }
    (alone,) = prepared(numbers(case["length"], 1, seed=9 if case["shuffled"] else None), **options)
    orders = [list(itertools.chain(*alone)) for _ in range(case["epoch"] + 2)]
    order, following = orders[-2:]

    old_readers, new_readers = case["readers"]
    old = prepared(make, old_readers, **options)
    for _ in range(case["epoch"]):
        rounds(old)
    before, iterators = rounds(old, case["rounds"])
    assume(len(before) == case["rounds"])  # else the epoch is over
    states = {json.dumps(saved(loader)["consumed"]) for loader in old}
    state = saved(old[0])
    rest_of_old = real(rounds_of(old, iterators))

    def elsewhere(reader):  # other seeds: the position alone has to tell
        return numbers(
            case["length"],
            case["batch_size"],
            seed=77 if case["shuffled"] else None,
            drop_last=case["drop_last"],
        )(reader)

    new = prepared(elsewhere, new_readers, **options)
    for loader in new:
        loader.load_state_dict(state)
    over = new[0].epoch > case["epoch"]  # then the next loop is the next epoch's
    after = [] if over else real(rounds(new)[0])
    handed_out = real(before) + after
    assert handed_out == order[: len(handed_out)]
    per_round = case["batch_size"] if case["split"] else case["batch_size"] * max(old_readers, new_readers)
    assert len(order) - len(handed_out) < (per_round if case["drop_last"] else 1)
    if old_readers == new_readers:
        assert after == rest_of_old
    if case["even"]:
        assert len(states) == 1
    next_epoch = real(rounds(new)[0])
    assert next_epoch == following[: len(next_epoch)]


def rounds_of(loaders, iterators):
    """The rounds that are left of an epoch that was begun."""
    found = []
    while True:
        batches = [next(iterator, None) for iterator in iterators]
        if all(batch is None for batch in batches):
            return found
        found.append((batches, loaders[0].remainder, None))


# -- several loaders ------------------------------------------------------------------------------


def training_and_validation(kind="map"):
    """Prepared loaders of one run, over 0..7 in batches of 2 and 100..111 in batches of 3."""
    make = {
        "map": lambda: DataLoader(range(100, 112), 3, collate_fn=plain),
        "stream": lambda: DataLoader(Hundreds(), 3, collate_fn=plain),
    }[kind]
    (run,) = world()
    return prepare_loader(numbers(8)(0), run), prepare_loader(make(), run)


class Hundreds(IterableDataset):
    def __iter__(self):
        return iter(range(100, 112))


def resumed(*states):
    """The batches of the next loops of loaders that go on from these states."""
    loaders = training_and_validation("stream" if states[1]["kind"] == "replay" else "map")
    for loader, state in zip(loaders, states, strict=True):
        loader.load_state_dict(state)
    return [list(loader) for loader in loaders]


WHOLE = [[100, 101, 102], [103, 104, 105], [106, 107, 108], [109, 110, 111]]


def first_two(validation):
    for number, _ in enumerate(validation):
        if number == 1:
            break


def a_fixed_batch(validation):
    assert next(iter(validation)) == WHOLE[0]


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("look", [first_two, a_fixed_batch])
def test_a_loader_that_is_left_inside_anothers_loop_begins_anew(kind, look):
    train, validation = training_and_validation(kind)
    states = []
    for number, _ in enumerate(train):
        look(validation)
        states.append((saved(train), saved(validation)))
        if number == 2:
            break
    states.append((saved(train), saved(validation)))  # nothing runs any more
    left = [[[2, 3], [4, 5], [6, 7]], [[4, 5], [6, 7]], [[6, 7]], [[6, 7]]]
    assert [resumed(*state) for state in states] == [[rest, WHOLE] for rest in left]


def test_a_loader_that_is_left_inside_a_loop_over_windows_begins_anew():
    train, validation = training_and_validation()
    with closing(train.host_batches()) as batches:
        for _, hand_out in batches:
            hand_out()
            first_two(validation)
            batches.settle()
            break
    assert resumed(saved(train), saved(validation)) == [[[2, 3], [4, 5], [6, 7]], WHOLE]


def test_a_loader_that_was_looked_at_before_anothers_loop_begins_anew_if_saved_there():
    train, validation = training_and_validation()
    first_two(validation)
    before = saved(validation)
    states = [(saved(train), saved(validation)) for _ in train]
    assert [resumed(*state)[1] for state in states] == [WHOLE] * 4
    assert resumed(saved(train), before)[1] == WHOLE[2:]  # nothing else ran: as documented


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("cut", [None, 2])
def test_a_validation_that_is_cut_short_after_the_training_loop_begins_anew(kind, cut):
    train, validation = training_and_validation(kind)
    run = train._run
    for number, _ in enumerate(train):
        run.trained_from.update(run.active_loaders)  # as an optimizer step does
        if number == cut:
            break
    first_two(validation)
    rest = [[0, 1], [2, 3], [4, 5], [6, 7]] if cut is None else [[6, 7]]
    assert resumed(saved(train), saved(validation)) == [rest, WHOLE]


def test_loaders_that_train_together_go_on_where_they_were_left_after_a_validation():
    train, other = training_and_validation()
    for number, _ in enumerate(zip(train, other, strict=False)):
        train._run.trained_from.update(train._run.active_loaders)
        if number == 1:
            break
    assert resumed(saved(train), saved(other)) == [[[4, 5], [6, 7]], WHOLE[2:]]


def test_loaders_that_are_read_together_both_go_on_where_they_were_left():
    train, validation = training_and_validation()
    for number, _ in enumerate(zip(train, validation, strict=False)):
        if number == 1:
            break
    assert resumed(saved(train), saved(validation)) == [[[4, 5], [6, 7]], WHOLE[2:]]


def test_an_iterator_that_is_held_goes_on_and_leaves_the_loop_around_it_alone():
    train, validation = training_and_validation()
    list(train)
    held = iter(validation)
    for epoch in range(2):
        for number, _ in enumerate(train):
            if epoch == 0 or number == 0:
                next(held, None)
            if epoch and number == 1:
                break
        if epoch == 0:
            held = iter(validation)
    assert resumed(saved(train), saved(validation)) == [[[4, 5], [6, 7]], WHOLE[1:]]


SAMPLERS = {
    "random": lambda data, g: RandomSampler(data, generator=g),
    "replacement": lambda data, g: RandomSampler(data, replacement=True, num_samples=100, generator=g),
    "subset": lambda data, g: SubsetRandomSampler(range(40), generator=g),
    "weighted": lambda data, g: WeightedRandomSampler([1.0] * 40, 50, generator=g),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("epoch", [0, 1])
def test_default_settings_resume_exactly(sampler, own_generator, epoch, workers):
    def train(loader, noise, *, until=None):
        """Batches, with a number drawn beside each as dropout would."""
        for batch in itertools.islice(loader, until):
            noise.append((tuple(batch), torch.rand(()).item()))

    def make(seed):
        data = Numbers(40)
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed) if own_generator else None
        return prepared(
            lambda _: DataLoader(
                data,
                4,
                sampler=SAMPLERS[sampler](data, generator),
                generator=generator,
                collate_fn=plain,
                num_workers=workers,
            )
        )[0]

    loader, expected = make(1), []
    for _ in range(epoch):
        train(loader, [])
    iterator = iter(loader)
    train(iterator, [], until=4)
    state, stream = saved(loader), torch.get_rng_state()
    train(iterator, expected)
    train(loader, expected)

    again, found = make(2), []
    again.load_state_dict(state)
    torch.set_rng_state(stream)
    train(again, found)
    train(again, found)
    assert found == expected
    assert again.epoch == epoch + 2


@pytest.mark.parametrize("rest", [None, 1, 2])
@pytest.mark.parametrize("until", [4, 9, 10])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", [*SAMPLERS, "more"])
def test_a_resumed_epoch_leaves_the_users_generator_where_it_was_left(sampler, workers, until, rest):
    """`rest`: batches after which the epoch is left; None: read to its end."""

    def make(seed):
        generator, data = torch.Generator().manual_seed(seed), Numbers(40)
        kinds = {**SAMPLERS, "more": lambda data, g: RandomSampler(data, num_samples=60, generator=g)}
        loader = DataLoader(
            data, 4, sampler=kinds[sampler](data, generator), collate_fn=plain, num_workers=workers
        )
        return prepared(lambda _: loader)[0]

    loader = make(1)
    iterator = iter(loader)
    list(itertools.islice(iterator, until))
    state = saved(loader)
    expected = list(itertools.islice(iterator, rest))
    del iterator

    again = make(2)
    again.load_state_dict(state)
    if expected:  # else the next loop is that of the next epoch
        assert list(itertools.islice(again, rest)) == expected
    assert [*again] == [*loader]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_generator_that_loaders_share_goes_on_where_it_was(sampler):
    def make(seed):
        generator, data = torch.Generator().manual_seed(seed), Numbers(40)
        train = DataLoader(data, 4, sampler=SAMPLERS[sampler](data, generator), collate_fn=plain)
        return [
            prepared(lambda _, user=user: user)[0]
            for user in (train, DataLoader(data, 4, generator=generator))
        ]

    train, test = make(1)
    iterator = iter(train)
    list(itertools.islice(iterator, 5))
    list(test)  # draws from the generator, in the middle of the other's epoch
    states = [saved(loader) for loader in (train, test)]
    expected = [*iterator], [*train]

    again = make(2)
    for loader, state in zip(again, states, strict=True):
        loader.load_state_dict(state)
    assert ([*again[0]], [*again[0]]) == expected


def test_a_position_is_small():
    torch.manual_seed(1)
    (loader,) = prepared(lambda _: DataLoader(Numbers(40), 4, shuffle=True))
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 320


def test_the_position_counts_what_was_handed_out_not_what_workers_fetched():
    (loader,) = prepared(lambda _: DataLoader(Numbers(40), 4, num_workers=2))
    for number, _ in enumerate(loader, start=1):
        assert loader.state_dict()["consumed"] == 4 * number


def test_an_epoch_saved_at_its_last_batch_resumes_with_the_next_epoch():
    (loader,) = prepared(numbers(10, 4, seed=3))
    for _ in loader:
        state = saved(loader)
    (again,) = prepared(numbers(10, 4, seed=5))
    again.load_state_dict(state)
    assert (again.epoch, list(again)) == (1, list(loader))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers(10), Stream(10)], ids=["map", "iterable"])
def test_one_reader_of_uneven_batches_knows_the_last_one(dataset, workers):
    def make(reader):
        return DataLoader(dataset, 4, num_workers=workers, collate_fn=plain)

    (loader,) = prepared(make, even_batches=False)
    for _ in loader:
        state = saved(loader)
    (again,) = prepared(make, even_batches=False)
    again.load_state_dict(state)
    assert (again.epoch, list(again)) == (1, list(loader))


def test_a_position_between_two_epochs_is_the_start_of_the_next():
    (loader,) = prepared(numbers(10, 4, seed=2))
    list(loader)
    state = saved(loader)
    expected = list(loader)
    (again,) = prepared(numbers(10, 4, seed=8))
    again.load_state_dict(state)
    assert (again.epoch, list(again)) == (1, expected)


def test_a_loop_that_was_broken_off_goes_on_where_it_was():
    (loader,) = prepared(numbers(8, 2))
    for _ in loader:
        break
    (again,) = prepared(numbers(8, 2))
    again.load_state_dict(saved(loader))
    assert list(again) == [[2, 3], [4, 5], [6, 7]]


def test_a_new_loop_after_a_broken_one_is_a_new_epoch():
    (loader,) = prepared(numbers(4, 2))
    for _ in loader:
        break
    assert loader.epoch == 1
    assert list(loader) == [[0, 1], [2, 3]]


def test_batches_done_is_where_the_loop_stands_or_will_begin():
    (loader,) = prepared(numbers(8, 2))
    assert loader.batches_done == 0
    assert [(loader.batches_done, saved(loader))[0] for _ in loader] == [1, 2, 3, 4]
    assert loader.batches_done == 0, "the next epoch's"
    for _ in loader:
        break
    state = saved(loader)
    assert loader.batches_done == 0, "a new loop begins a new epoch"
    (again,) = prepared(numbers(8, 2))
    again.load_state_dict(state)
    assert again.batches_done == 1
    assert [number for number, _ in enumerate(again, again.batches_done)] == [1, 2, 3]
    rest = skip_first_batches(again, 3)
    assert (rest.batches_done, [rest.batches_done for _ in rest]) == (3, [4])


def test_batches_done_of_other_readers_and_of_data_that_is_read_again():
    first, _ = prepared(numbers(16, 2), 2)
    batches = iter(first)
    next(batches), next(batches)
    assert first.batches_done == 2
    for again in prepared(numbers(16, 2), 4):
        again.load_state_dict(saved(first))
        assert again.batches_done == 1, "of twice as many samples"
    (stream,) = prepared(lambda _: DataLoader(Stream(8), 2, collate_fn=plain))
    assert [stream.batches_done for _ in stream] == [1, 2, 3, 4]


def test_skipping_by_hand_what_the_position_skips_already_skips_once():
    (loader,) = prepared(numbers(8, 2))
    iterator = iter(loader)
    next(iterator), next(iterator)
    (again,) = prepared(numbers(8, 2))
    again.load_state_dict(saved(loader))
    assert list(skip_first_batches(again, 2)) == [[4, 5], [6, 7]]
    assert list(again) == list(numbers(8, 2)(0))


def test_telling_the_epoch_that_is_resumed_changes_nothing():
    (loader,) = prepared(numbers(4, 2))
    list(loader)
    next(iter(loader))
    for epoch, expected in ((1, [[2, 3]]), (2, [[0, 1], [2, 3]])):
        (again,) = prepared(numbers(4, 2))
        again.load_state_dict(saved(loader))
        again.set_epoch(epoch)
        assert list(again) == expected


@pytest.mark.parametrize("new_readers", [1, 2, 3])
def test_the_users_own_batches_go_on_at_another_number_of_readers(new_readers):
    def make(_):
        return DataLoader(Numbers(20), batch_sampler=Ragged(20), collate_fn=plain)

    old = prepared(make, 2)
    before, _ = rounds(old, 2)
    new = prepared(make, new_readers)
    for loader in new:
        loader.load_state_dict(saved(old[0]))
    assert real(before) + real(rounds(new)[0]) == list(range(20))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("readers", [1, 2])
def test_iterable_datasets_are_read_again_and_skipped(readers, workers):
    def make(_):
        return DataLoader(Stream(21), 2, collate_fn=plain, num_workers=workers)

    old = prepared(make, readers)
    _, iterators = rounds(old, 3)
    new = prepared(make, readers)
    for loader in new:
        loader.load_state_dict(saved(old[0]))
    assert real(rounds(new)[0]) == real(rounds_of(old, iterators))
    assert real(rounds(new)[0]) == real(rounds(old)[0])


def position_of(make, readers=1):
    loader = prepared(make, readers)[0]
    next(iter(loader))
    return saved(loader)


def sampled(sampler, **options):
    """Make a loader over 8 numbers in the order of this sampler."""
    return lambda _: DataLoader(range(8), 2, sampler=sampler(range(8), **options))


@pytest.mark.parametrize(
    ("state", "make", "readers", "says"),
    [
        (position_of(numbers(8)), numbers(9), 1, "8 samples or batches, here 9"),
        (position_of(numbers(8)), lambda _: DataLoader(Stream(8), 2), 1, "'indexed'.*'replay'"),
        (position_of(lambda _: DataLoader(Stream(8))), lambda _: DataLoader(Stream(8), 4), 1, "batch size"),
        (position_of(numbers(8)), numbers(8, seed=1), 1, "order of SequentialSampler, here RandomSampler\n"),
        (position_of(numbers(8, seed=1)), numbers(8), 3, "order of RandomSampler, here SequentialSampler\n"),
        (
            position_of(sampled(RandomSampler)),
            sampled(SubsetRandomSampler),
            1,
            "here SubsetRandomSampler\n",
        ),
        (position_of(sampled(RandomSampler)), sampled(RandomSampler, replacement=True), 3, "replacement\n"),
    ],
)
def test_a_position_that_means_nothing_here_is_refused(state, make, readers, says):
    (loader, *_) = prepared(make, readers)
    with pytest.raises(CheckpointError, match=says):
        loader.load_state_dict(state)


def test_an_order_is_gone_on_with_where_the_loader_has_no_generator_any_more():
    (old,), (new,) = prepared(numbers(8, seed=1)), prepared(lambda _: DataLoader(Numbers(8), 2, shuffle=True))
    begun = iter(old)
    next(begun)
    new.load_state_dict(saved(old))
    assert [batch.tolist() for batch in new] == [*begun]


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("skips", [False, True])
def test_an_order_that_is_not_random_is_not_read_up_to_the_position(readers, skips):
    far = 12 * 10**11  # reading so far would take hours
    loaders = prepared(numbers(far + 8), readers)
    if skips:
        loaders = [skip_first_batches(loader, far // (2 * readers)) for loader in loaders]
    for loader in loaders if not skips else ():
        loader.load_state_dict({**saved(loader), "consumed": far})
    found, _ = rounds(loaders, 1)
    assert found[0][0] == [[far + 2 * reader, far + 2 * reader + 1] for reader in range(readers)]
    assert saved(loaders[0])["consumed"] == far + 2 * readers


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_whose_first_batch_is_not_asked_for_yet_is_not_begun_again(workers):
    """As of an evaluation whose iterator is held from the start: each resume drew a number more."""

    def make():
        (loader,) = prepared(lambda _: DataLoader(Numbers(6), 2, num_workers=workers, collate_fn=plain))
        return loader

    torch.manual_seed(3)
    loader = make()
    batches = iter(loader)
    state, stream = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
    again = make()
    torch.manual_seed(77)
    again.load_state_dict(state)
    torch.set_rng_state(stream)
    assert list(again) == list(batches)
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_save_in_the_middle_of_data_without_a_state_says_once_what_a_resume_does(caplog):
    (loader,) = prepared(lambda _: DataLoader(Stream(8), 2, collate_fn=plain))
    saved(loader)
    for _ in loader:
        saved(loader)
    assert caplog.text.count("the dataset Stream has no state: a resume in the middle of its epoch") == 1
    assert "leaves 1 batches out" in caplog.text
    assert "give it state_dict and load_state_dict" in caplog.text


def test_data_whose_position_is_known_is_saved_without_a_word(caplog):
    (loader,) = prepared(numbers(8))
    for _ in loader:
        saved(loader)
    assert caplog.text == ""
