"""How one order is dealt: the incumbent's examples, and properties for every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_core.data.sharding import NO_PADDING, PARTIAL_ROUND, Sharding, batched, split_head, with_last


def dealt(length, batch_size, readers, **rule):
    """The shares of each reader, as [(batch, real samples in its round)]."""
    found = []
    for reader in range(readers):
        deal = Sharding(reader=reader, readers=readers, batch_size=batch_size, **rule)
        head, items = split_head(range(length), deal.wanted, 0)
        shares = deal.shares(batched(items, batch_size, drop_last=deal.drop_last), head)
        found.append([(batch, real) for (batch,), real in shares])
    return found


def batches(shares):
    return [list(batch) for batch, _ in shares]


def test_each_reader_takes_whole_batches_in_turn():
    first, second = dealt(8, 4, 2)
    assert batches(first) == [[0, 1, 2, 3]]
    assert batches(second) == [[4, 5, 6, 7]]


def test_split_batches_gives_each_reader_a_slice_of_each_batch():
    first, second = dealt(8, 4, 2, split=True)
    assert batches(first) == [[0, 1], [4, 5]]
    assert batches(second) == [[2, 3], [6, 7]]


def test_a_short_last_round_is_filled_from_the_start_of_the_order():
    first, second = dealt(11, 4, 2)
    assert batches(first) == [[0, 1, 2, 3], [8, 9, 10, 0]]
    assert batches(second) == [[4, 5, 6, 7], [1, 2, 3, 4]]
    assert [real for _, real in second] == [NO_PADDING, 3]


def test_a_dataset_shorter_than_the_world_wraps_round_more_than_once():
    assert [batches(shares) for shares in dealt(2, 2, 3)] == [[[0, 1]], [[0, 1]], [[0, 1]]]
    assert [batches(shares) for shares in dealt(1, 2, 2)] == [[[0, 0]], [[0, 0]]]


def test_uneven_batches_leave_the_last_round_as_it_is():
    first, second = dealt(10, 4, 2, even=False)
    assert batches(first) == [[0, 1, 2, 3], [8, 9]]
    assert batches(second) == [[4, 5, 6, 7]]
    assert [batches(shares) for shares in dealt(5, 4, 2, even=False, split=True)] == [[[0, 1], [4]], [[2, 3]]]


def test_drop_last_leaves_out_the_round_that_is_not_complete():
    first, second = dealt(14, 4, 2, drop_last=True)
    assert batches(first) == [[0, 1, 2, 3]]
    assert batches(second) == [[4, 5, 6, 7]]


def test_one_reader_is_never_padded():
    assert dealt(5, 4, 1) == [[([0, 1, 2, 3], NO_PADDING), ([4], NO_PADDING)]]


def test_batches_without_a_size_are_padded_by_whole_batches():
    own = [[0], [1, 2], [3, 4, 5]]
    for reader, expected in enumerate([[[0], [3, 4, 5]], [[1, 2], [0]]]):
        deal = Sharding(reader=reader, readers=2, batch_size=None)
        assert [batch for (batch,), _ in deal.shares(own, own[: deal.wanted])] == expected


def test_an_empty_order_has_no_rounds():
    assert dealt(0, 4, 3) == [[], [], []]


@pytest.mark.parametrize("items", [[], [1], [1, 2, 3]])
def test_with_last_marks_the_last_item_only(items):
    assert [item for item, _ in with_last(items)] == items
    assert [last for _, last in with_last(items)] == [False] * (len(items) - 1) + [True] * bool(items)


def test_opening_keeps_the_start_of_the_order_for_padding_when_it_skips():
    head, rest = split_head(range(6), 2, 4)
    assert (head, list(rest)) == ([0, 1], [4, 5])


@given(
    length=st.integers(0, 50),
    slice_size=st.integers(1, 4),
    readers=st.integers(1, 5),
    split=st.booleans(),
    even=st.booleans(),
    drop_last=st.booleans(),
)
def test_nothing_is_lost_and_nothing_comes_twice_but_padding(
    length, slice_size, readers, split, even, drop_last
):
    batch_size = slice_size * readers if split else slice_size
    every = dealt(length, batch_size, readers, split=split, even=even, drop_last=drop_last)
    order = []
    for number in range(max(map(len, every), default=0)):
        shares = [shares[number] for shares in every if number < len(shares)]
        together = [sample for batch, _ in shares for sample in batch]
        real = {real for _, real in shares}
        assert len(real) == 1
        assert real == {PARTIAL_ROUND} if len(shares) < readers else PARTIAL_ROUND not in real
        order += together if max(real) < 0 else together[: max(real)]
    per_round = slice_size * readers
    complete = length // per_round * per_round
    assert order == list(range(complete if drop_last else length))
    if even or drop_last:
        assert len({len(shares) for shares in every}) == 1
    number_of_batches = length // batch_size if drop_last else -(-length // batch_size)
    for reader, shares in enumerate(every):
        deal = Sharding(
            reader=reader, readers=readers, batch_size=batch_size, split=split, even=even, drop_last=drop_last
        )
        assert deal.length(number_of_batches, length) == len(shares)
        if readers > 1 and even:
            assert all(len(batch) == slice_size for batch, _ in shares)
