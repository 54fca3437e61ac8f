"""The boxes of all ranks make up each leaf exactly once, or the problem is named; replicas are spread."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import groups_of, in_turns, plan
from tilings import tilings

from accel_core.errors import CheckpointError
from accel_core.storage import plan as module
from accel_core.storage.leaves import Box, Declared
from accel_core.storage.plan import Group, gather_groups, intersect, tiling_problem
from accel_core.storage.plan import plan as plan_of_rank

KEY = ("unit0", "model/w")


def leaf(shape, *boxes, replicated=False, any_replica_may_write=True, dtype="float32", kind="like_param"):
    dtypes = (dtype,) * len(boxes)
    return Declared(
        kind, shape, None, replicated, any_replica_may_write, dtypes, tuple(Box(*box) for box in boxes)
    )


@given(tilings())
def test_a_tiling_has_no_problem(tiling):
    shape, boxes = tiling
    assert tiling_problem(shape, boxes) is None


@given(tilings(), st.data())
def test_a_missing_box_is_a_gap(tiling, data):
    shape, boxes = tiling
    lost = data.draw(st.sampled_from(boxes))
    problem = tiling_problem(shape, [box for box in boxes if box != lost])
    assert problem == f"{lost.volume} of its {math.prod(shape)} elements are held by no rank"


@given(tilings(), st.data())
def test_a_box_grown_by_one_is_an_overlap_or_outside(tiling, data):
    shape, boxes = tiling
    grown = data.draw(st.sampled_from(boxes))
    dim = data.draw(st.integers(0, len(shape) - 1))
    larger = Box(grown.offset, (*grown.shape[:dim], grown.shape[dim] + 1, *grown.shape[dim + 1 :]))
    problem = tiling_problem(shape, [larger if box == grown else box for box in boxes])
    assert "overlap" in problem or "is not inside of" in problem


@given(tilings(), tilings())
def test_intersect_is_what_both_have(one, other):
    def cells(box):
        ranges = [range(start, start + size) for start, size in zip(box.offset, box.shape, strict=True)]
        found = {()}
        for each in ranges:
            found = {(*cell, index) for cell in found for index in each}
        return found

    a, b = one[1][0], other[1][-1]
    if len(a.shape) == len(b.shape):
        common = intersect(a, b)
        assert (cells(common) if common else set()) == cells(a) & cells(b)


@given(tilings(), st.integers(1, 4), st.data())
def test_every_box_is_written_once_whoever_holds_it(tiling, ranks, data):
    shape, boxes = tiling
    held = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in boxes]
    declarations = [
        {
            KEY: leaf(
                shape,
                *(box for box, holders in zip(boxes, held, strict=True) if rank in holders),
                replicated=True,
            )
        }
        for rank in range(ranks)
    ]
    writes = plan(declarations)
    written = Counter(box for rank in writes for box in rank.get(KEY, ()))
    assert written == Counter(boxes)
    for rank, write in enumerate(writes):
        assert set(write.get(KEY, ())) <= set(declarations[rank][KEY].boxes)


def test_replicas_are_spread_over_the_ranks():
    whole = {
        ("unit0", f"model/{number}"): leaf((100,), ((0,), (100,)), replicated=True) for number in range(8)
    }
    writes = plan([whole] * 4)
    assert [sum(map(len, write.values())) for write in writes] == [2, 2, 2, 2]


def test_replicas_that_may_differ_are_those_of_the_lowest_rank():
    whole = {KEY: leaf((4,), ((0,), (4,)), replicated=True, any_replica_may_write=False)}
    assert plan([{}, whole, whole])[1] == {KEY: [Box((0,), (4,))]}


def test_a_scalar_may_be_held_by_some_ranks_only():
    scalar = {KEY: leaf((), ((), ()), replicated=True, kind="scalar")}
    assert sum(len(write) for write in plan([{}, scalar, scalar])) == 1


def test_an_empty_tensor_is_written_so_that_it_is_known():
    assert plan([{KEY: leaf((0, 3), ((0, 0), (0, 3)))}]) == [{KEY: [Box((0, 0), (0, 3))]}]


def test_an_empty_shard_is_not_written():
    declarations = [{KEY: leaf((4,), ((0,), (4,)))}, {KEY: leaf((4,), ((4,), (0,)))}]
    assert plan(declarations) == [{KEY: [Box((0,), (4,))]}, {}]


@pytest.mark.parametrize(
    ("declarations", "problem"),
    [
        (
            [{KEY: leaf((4,), ((0,), (4,)))}] * 2,
            r"ranks 0 and 1 both hold \[0:4\], which is not declared replicated",
        ),
        ([{KEY: leaf((4,), ((0,), (3,)))}, {KEY: leaf((4,), ((2,), (2,)))}], r"\[0:3\] and \[2:4\] overlap"),
        ([{KEY: leaf((4,), ((0,), (2,)))}, {}], "2 of its 4 elements are held by no rank"),
        ([{KEY: leaf((4,))}], "4 of its 4 elements are held by no rank"),
        ([{KEY: leaf((4,), ((0,), (4,)))}, {KEY: leaf((5,))}], "rank 0 says .*, rank 1"),
        (
            [{KEY: leaf((4,), ((0,), (2,)))}, {KEY: leaf((4,), ((2,), (2,)), dtype="bfloat16")}],
            "its parts have several dtypes, bfloat16, float32",
        ),
        ([{KEY: leaf((4,), ((0, 0), (4, 1)))}], "is not inside of"),
    ],
)
def test_what_does_not_fit_together_is_refused_and_named(declarations, problem):
    with pytest.raises(CheckpointError, match=f"unit0: model/w: .*{problem}"):
        plan(declarations)


def test_all_problems_are_named_at_once():
    declared = {("u", f"model/{number}"): leaf((2,)) for number in range(3)}
    with pytest.raises(CheckpointError) as refused:
        plan([declared])
    assert all(f"u: model/{number}" in str(refused.value) for number in range(3))


@st.composite
def several_leaves(draw):
    """Declarations of leaves that are declared in few ways, and of some that fit nowhere."""
    ranks = draw(st.integers(1, 4))
    ways = []
    for _ in range(draw(st.integers(1, 3))):
        shape, boxes = draw(tilings())
        held = [draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2)) for _ in boxes]
        replicated, spread = draw(st.booleans()), draw(st.booleans())
        ways.append(
            [
                leaf(
                    shape,
                    *(box for box, holders in zip(boxes, held, strict=True) if rank in holders),
                    replicated=replicated,
                    any_replica_may_write=spread,
                )
                for rank in range(ranks)
            ]
        )
    keys = draw(st.lists(st.sampled_from([("u", f"model/{number}") for number in range(9)]), unique=True))
    way = {key: draw(st.sampled_from(ways)) for key in keys}
    lost = draw(st.sets(st.tuples(st.sampled_from([None, *keys]), st.integers(0, ranks - 1)), max_size=1))
    declarations = []
    for rank in range(ranks):
        here = keys if draw(st.booleans()) else draw(st.permutations(keys))
        declarations.append({key: way[key][rank] for key in here if (key, rank) not in lost})
    return declarations, draw(st.lists(st.integers(0, 1), min_size=ranks, max_size=ranks))


@given(several_leaves())
def test_leaves_are_planned_in_groups_as_each_would_be_by_itself(several):
    declarations, disks = several
    keys = dict.fromkeys(key for declared in declarations for key in declared)
    apart = [
        Group([key], [(rank, each[key]) for rank, each in enumerate(declarations) if key in each])
        for key in keys
    ]
    for rank, groups in enumerate(groups_of(declarations)):
        assert sorted(key for group in groups for key in group.keys) == sorted(keys)
        told = []
        for each in (groups, apart):
            try:
                told.append(plan_of_rank(each, rank, disks))
            except CheckpointError as refused:
                told.append(sorted(str(refused).splitlines()))
        assert told[0] == told[1]


@pytest.mark.parametrize("number", [30, 300])
def test_each_way_to_declare_leaves_is_looked_at_once(number, monkeypatch):
    shapes, looks = [(8, 4), (4,), ()], []
    monkeypatch.setattr(
        module,
        "tiling_problem",
        lambda shape, boxes: looks.append(shape) or tiling_problem(shape, boxes),
    )
    declared = {
        ("u", f"model/{each}"): leaf(shapes[each % 3], ((0,) * len(shapes[each % 3]), shapes[each % 3]))
        for each in range(number)
    }
    plan_of_rank(groups_of([declared, {}])[0], 0, [0, 0])
    assert looks == shapes


def test_names_of_leaves_travel_only_where_ranks_have_others():
    def messages(declarations):
        _, rounds = in_turns(
            len(declarations),
            lambda comm: gather_groups(comm, declarations[comm.rank], lambda: None),
        )
        return [[len(pickle.dumps(told)) for told in each] for each in rounds]

    def stage(number, leaves=1000):
        whole = leaf((64, 64), ((0, 0), (64, 64)), replicated=True)
        return {("u", f"model/{number}.layers.{each}.weight"): whole for each in range(leaves)}

    (alike,) = messages([stage(0)] * 4)
    assert max(alike) < 600
    assert messages([stage(0, 10)] * 4) == [alike]  # however many leaves there are
    first, names = messages([stage(0), stage(1), stage(1), stage(0)])
    assert max(first) < 600
    assert [size > 10_000 for size in names] == [True, True, False, False]


def test_what_is_wrong_with_leaves_is_raised_where_ranks_agree():
    def check():
        raise CheckpointError("odd name\nuse another")

    with pytest.raises(CheckpointError, match="odd name"):
        in_turns(3, lambda comm: gather_groups(comm, {}, check))
