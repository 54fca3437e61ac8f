"""Whatever the state is and however it is cut up, it comes back, in any other cut, in any world."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_values import VALUES, same
from rank_threads import State, in_ranks
from tilings import tilings

from accel_core import CheckpointError, Leaf, flat_range

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    """A tensor of any dtype and shape, of random bytes."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    size = math.prod(shape) * dtype.itemsize
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=seed)
    return data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def bytes_in(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@st.composite
def cuts(draw, shape, dtype, ranks):
    """How `ranks` ranks hold a tensor of that shape: for each, its leaf over storage of its own."""
    kind = draw(st.sampled_from(["boxes", "flat", "whole"]))
    whole = Leaf(kind="like_param", global_shape=shape, shards=(((0,) * len(shape), None),), replicated=True)
    if kind == "whole" or not shape or not math.prod(shape):
        holders = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
        return [
            filled(whole, dtype, [((0,) * len(shape), shape)] if rank in holders else [])
            for rank in range(ranks)
        ]
    if kind == "flat":
        size = math.prod(shape)
        ends = sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
        return [
            flat_range(torch.zeros(end - start, dtype=dtype), shape, start)
            for start, end in zip([0, *ends], [*ends, size], strict=True)
        ]
    _, boxes = draw(tilings(shape))
    held = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in boxes]
    return [
        filled(whole, dtype, [box for box, ranks_of in zip(boxes, held, strict=True) if rank in ranks_of])
        for rank in range(ranks)
    ]


def filled(like, dtype, boxes):
    shards = tuple((tuple(offset), torch.zeros(tuple(shape), dtype=dtype)) for offset, shape in boxes)
    return Leaf(kind=like.kind, global_shape=like.global_shape, shards=shards, replicated=True)


def part(tensor, offset, shape):
    return tensor[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "accel_core")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_it_comes_back(data, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    saving, loading = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    contents = {f"t{number}": each for number, each in enumerate(data.draw(st.lists(tensors(), max_size=4)))}
    state, other = State(data.draw(VALUES)), State()

    def held(ranks):
        by_name = {
            name: data.draw(cuts(tuple(each.shape), each.dtype, ranks)) for name, each in contents.items()
        }
        return [{name: leaves[rank] for name, leaves in by_name.items()} for rank in range(ranks)]

    before, after = held(saving), held(loading)
    for leaves in before:
        for name, leaf in leaves.items():
            for offset, tensor in leaf.shards:
                tensor.copy_(part(contents[name], offset, tensor.shape))
    in_ranks(before, state, lambda accelerator: accelerator.save_state(folder / "any"))
    in_ranks(after, other, lambda accelerator: accelerator.load_state(folder / "any"))
    assert same(other.value, state.value)
    for leaves in after:
        for name, leaf in leaves.items():
            for offset, tensor in leaf.shards:
                assert bytes_in(tensor) == bytes_in(part(contents[name], offset, tensor.shape)), name


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_lost_box_is_refused_and_nothing_is_left(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost")
    ranks, (shape, boxes) = data.draw(st.integers(1, 4)), data.draw(tilings())
    lost = data.draw(st.integers(0, len(boxes) - 1))
    whole = Leaf(kind="like_param", global_shape=shape, shards=())
    held = [
        {
            "t": filled(
                whole, torch.float32, [box for n, box in enumerate(boxes) if n != lost and n % ranks == rank]
            )
        }
        for rank in range(ranks)
    ]
    with pytest.raises(CheckpointError, match=r"model/t: \d+ of its \d+ elements are held by no rank"):
        in_ranks(held, State(), lambda accelerator: accelerator.save_state(folder / "any"))
    assert list(folder.iterdir()) == []
