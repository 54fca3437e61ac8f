"""How many workers read changes nothing: before a resume, after it, and in later epochs."""

from __future__ import annotations

import json
from itertools import chain, islice

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reader_worlds import Numbers, Ragged, Stream, plain, prepared, real, rounds
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

# On a machine with fewer cores torch says that they are many.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
WORKERS = st.integers(0, 3)


class Divided(IterableDataset):
    """0, 1, 2, ..., of which each worker reads its own."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, self.length, step))


def map_style(length, size, drop_last, own_batches, workers):
    def make(reader):
        batches = {"batch_sampler": Ragged(length)} if own_batches else {"batch_size": size}
        shuffled = {} if own_batches else {"shuffle": True, "drop_last": drop_last}
        return DataLoader(Numbers(length), collate_fn=plain, num_workers=workers, **batches, **shuffled)

    return make


@settings(deadline=None, max_examples=20)
@given(
    length=st.integers(1, 30),
    size=st.integers(1, 4),
    drop_last=st.booleans(),
    own_batches=st.booleans(),
    even=st.booleans(),
    readers=st.integers(1, 2),
    workers=st.tuples(WORKERS, WORKERS),
    handed_out=st.integers(0, 6),
)
def test_map_style_data_is_the_same_with_any_workers_and_goes_on_with_any_others(
    length, size, drop_last, own_batches, even, readers, workers, handed_out
):
    def loaders(workers):
        options = {"use_seedable_sampler": True, "data_seed": 3, "even_batches": even}
        return prepared(map_style(length, size, drop_last, own_batches, workers), readers, **options)

    alone = loaders(0)
    expected, following = rounds(alone)[0], rounds(alone)[0]
    if not drop_last or own_batches:
        assert sorted(real(expected)) == list(range(length))

    assume(handed_out < len(expected))  # else the epoch is over
    before, after = workers
    reading = loaders(before)
    begun, _ = rounds(reading, handed_out)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in reading]
    assert begun == expected[:handed_out]
    again = loaders(after)
    for loader in again:
        loader.load_state_dict(states[0])
    assert rounds(again)[0] == expected[handed_out:]
    assert rounds(again)[0] == following


@pytest.mark.full
@settings(deadline=None, max_examples=20)
@given(
    length=st.integers(1, 30),
    size=st.integers(1, 4),
    readers=st.integers(1, 2),
    workers=WORKERS,
    handed_out=st.integers(0, 6),
)
def test_a_stream_divided_between_workers_is_read_once_and_goes_on_with_as_many(
    length, size, readers, workers, handed_out
):
    def loaders():
        def make(reader):
            return DataLoader(Divided(length), batch_size=size, collate_fn=plain, num_workers=workers)

        return prepared(make, readers, even_batches=False, dispatch_batches=False)

    reading = loaders()
    expected, following = rounds(reading)[0], rounds(reading)[0]
    samples = chain.from_iterable(batch or () for batches, _, _ in expected for batch in batches)
    assert sorted(samples) == list(range(length))

    assume(handed_out < len(expected))
    reading = loaders()
    iterators = [iter(loader) for loader in reading]
    begun = [list(islice(iterator, handed_out)) for iterator in iterators]
    again = loaders()
    for loader, other in zip(again, reading, strict=True):
        loader.load_state_dict(json.loads(json.dumps(other.state_dict())))
    rest = [list(loader) for loader in again]
    whole = [[each[0][r] for each in expected if each[0][r] is not None] for r in range(readers)]
    assert [one + other for one, other in zip(begun, rest, strict=True)] == whole
    assert rounds(again)[0] == following


def test_workers_that_persist_leave_out_what_was_consumed_in_the_resumed_epoch_only():
    def make(_):
        return DataLoader(Stream(24), 2, collate_fn=plain, num_workers=1, persistent_workers=True)

    three, two = prepared(make, 3), prepared(make, 2)
    rounds(three, 1)
    for loader in two:
        loader.load_state_dict(json.loads(json.dumps(three[0].state_dict())))
    epochs = [rounds(two)[0] for _ in range(2)]
    samples = [
        sorted(sample for batches, *_ in epoch for batch in batches if batch for sample in batch)
        for epoch in epochs
    ]
    assert samples == [[0, 1, *range(6, 24)], [*range(24)]]  # the short last round is filled from the start
