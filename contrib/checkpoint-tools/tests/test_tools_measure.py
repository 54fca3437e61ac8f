"""Tensors are compared by their values, however their bytes are cut into boxes and blocks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accel_inspect import blocks, tensors
from accel_inspect.measure import Tolerance, measure
from accel_inspect.tensors import Box, StoredTensor
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from accel_core import CheckpointError, CheckpointFiles

EXACT = Tolerance()
sure = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
DTYPES = [*FLOATS, "int64", "uint8", "bool", "complex64"]


class Memory:
    """A file in memory."""

    path = Path("memory")

    def __init__(self, content):
        self.content = content

    def read(self, start, into):
        assert start + len(into) <= len(self.content)
        into[:] = self.content[start : start + len(into)]


def stored(tensor, cuts=None):
    """Return the tensor as a checkpoint has it, in these (offset, shape) boxes."""
    boxes, content = [], b""
    for offset, shape in cuts or [((0,) * tensor.ndim, tuple(tensor.shape))]:
        part = tensor[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
        boxes.append(((offset, shape), len(content)))
        content += part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    source = Memory(content)
    dtype = str(tensor.dtype).removeprefix("torch.")
    kept = [Box(part, source, start) for part, start in boxes]
    return StoredTensor(tuple(tensor.shape), dtype, "like_param", kept)


@st.composite
def cut(draw, shape):
    """Cut a shape into boxes, again and again, and shuffle them."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        boxes.append((offset, (*size[:dim], at, *size[dim + 1 :])))
        rest = (*offset[:dim], offset[dim] + at, *offset[dim + 1 :])
        boxes.append((rest, (*size[:dim], size[dim] - at, *size[dim + 1 :])))
    return draw(st.permutations([box for box in boxes if 0 not in box[1]]))


@st.composite
def layouts(draw):
    """A shape and two ways to cut it."""
    shape = draw(array_shapes(max_dims=3, max_side=9))
    return shape, draw(cut(shape)), draw(cut(shape))


@sure
@given(layouts(), st.integers(1, 50))
def test_any_two_layouts_of_one_tensor_are_equal(drawn, block):
    shape, one, other = drawn
    values = torch.arange(np.prod(shape)).reshape(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_ELEMENTS", block)
        assert measure(stored(values, one), stored(values, other), EXACT) is None


@sure
@given(layouts(), st.integers(1, 50), st.data())
def test_one_changed_element_is_found_in_any_layout(drawn, block, data):
    shape, one, other = drawn
    values = torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape)
    changed = values.clone()
    changed.view(-1)[data.draw(st.integers(0, values.numel() - 1))] += 0.5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_ELEMENTS", block)
        found = measure(stored(values, one), stored(changed, other), EXACT)

    assert (found.elements, found.different, found.max_abs) == (values.numel(), 1, 0.5)


@pytest.mark.parametrize("name", DTYPES)
def test_the_measures_are_those_of_torch(name, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 10)
    dtype = getattr(torch, name)
    a, b = (torch.randn(7, 9, generator=torch.Generator().manual_seed(seed)) * 3 for seed in (1, 2))
    a, b = (each > 0 if dtype is torch.bool else each.abs().to(dtype) for each in (a, b))

    found = measure(stored(a), stored(b), EXACT)

    wide = torch.complex128 if dtype.is_complex else torch.float64
    one, other = a.to(wide).reshape(-1), b.to(wide).reshape(-1)
    distance = (one - other).abs()
    assert found.different == int((distance > 0).sum())
    assert found.max_abs == pytest.approx(float(distance.max()))
    assert found.relative == pytest.approx(float(distance.norm() / one.norm()))
    angle = torch.vdot(one, other).real / (one.norm() * other.norm())
    assert found.cosine == pytest.approx(float(angle))


@sure
@given(st.lists(st.tuples(*[st.floats(width=32)] * 2), min_size=1), st.sampled_from([0.0, 1e-3, 1.0]))
def test_a_tolerance_counts_as_in_numpy(pairs, rtol):
    a, b = (torch.tensor(side, dtype=torch.float32) for side in zip(*pairs, strict=True))

    found = measure(stored(a), stored(b), Tolerance(rtol, 1e-2))

    wide = [each.double().numpy() for each in (a, b)]
    outside = int((~np.isclose(*wide, rtol=rtol, atol=1e-2, equal_nan=True)).sum())
    assert (found.different if found else 0) == outside


def test_nan_equals_nan_and_zero_equals_minus_zero():
    a, b = torch.tensor([float("nan"), 0.0, 1.0]), torch.tensor([float("nan"), -0.0, 1.0])

    assert measure(stored(a), stored(b), EXACT) is None


def test_a_nan_on_one_side_is_a_difference_that_no_tolerance_hides():
    a, b = torch.tensor([float("nan"), 1.0]), torch.tensor([5.0, 1.0])

    found = measure(stored(a), stored(b), Tolerance(rtol=1e9, atol=1e9))

    assert found.different == 1
    assert np.isnan(found.max_abs)
    assert np.isnan(found.relative)


def test_large_integers_that_are_one_float_differ():
    a, b = torch.tensor([2**60]), torch.tensor([2**60 + 1])

    assert measure(stored(a), stored(b), EXACT).max_abs == 1


def test_values_in_two_dtypes_are_compared_as_numbers():
    a = torch.tensor([1.0, 2.5])

    assert measure(stored(a), stored(a.bfloat16()), EXACT) is None
    assert measure(stored(a), stored((a + 1).bfloat16()), EXACT).max_abs == 1


def test_elements_that_are_not_numbers_to_numpy_are_counted_and_not_measured():
    a, b = (stored(torch.tensor([0, 7, value], dtype=torch.int32)) for value in (8, 9))

    found = measure(evolve(a, dtype="complex32"), evolve(b, dtype="complex32"), EXACT)

    assert (found.different, found.elements, found.max_abs) == (1, 3, None)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_empty_tensors_are_compared(shape):
    assert measure(stored(torch.ones(shape)), stored(torch.ones(shape)), EXACT) is None


def test_a_scalar_that_differs_is_found():
    assert measure(stored(torch.tensor(1.0)), stored(torch.tensor(3.0)), EXACT).relative == 2


@pytest.mark.parametrize("cuts", [[((0,), (2,))], [((0,), (3,)), ((1,), (3,))]], ids=["a gap", "an overlap"])
def test_boxes_that_do_not_make_up_the_tensor_are_an_error(cuts):
    values = torch.arange(4)

    with pytest.raises(CheckpointError, match=r"(?s)of 4 elements .* there are .*checkpoint verify"):
        measure(stored(values, cuts), stored(values), EXACT)


def test_of_many_boxes_a_block_looks_at_its_own(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 4)
    values = torch.arange(400).reshape(100, 4)
    rows = [((row, 0), (1, 4)) for row in reversed(range(100))]
    looked = []
    plain = tensors.common
    monkeypatch.setattr(tensors, "common", lambda *parts: looked.append(parts) or plain(*parts))

    assert measure(stored(values, rows), stored(values), EXACT) is None
    assert len(looked) == 2 * 100


OUTLINE = {"kind": "like_param", "shape": [8], "dtype": "int64", "layout": None}


def opened(shares, domains):
    return CheckpointFiles(Path(), SimpleNamespace(domains=domains), {}, shares, None)


def test_of_copies_on_several_nodes_one_is_read():
    values = torch.arange(8)
    (box,) = stored(values).boxes
    index = {"outlines": [OUTLINE], "tensors": {"unit0": {"model/a": [0, 0]}}}
    shares = dict.fromkeys(range(3), (box.source, index))

    (found,) = tensors.tensors_of(opened(shares, domains=[[0], [1], [2]])).values()

    assert found.boxes == [box]


def test_tensors_of_several_ranks_are_in_the_order_of_their_names():
    (box,) = stored(torch.arange(8)).boxes
    ranks = [{"unit0": ["model/layers.10.a"], "": ["a"]}, {"unit0": ["optimizer/b/step", "model/layers.9.a"]}]
    shares = {
        rank: (
            box.source,
            {
                "outlines": [OUTLINE],
                "tensors": {unit: {name: [0, 0] for name in names} for unit, names in units.items()},
            },
        )
        for rank, units in enumerate(ranks)
    }
    found = tensors.tensors_of(opened(shares, domains=None))

    assert [name for _, name in found] == ["model/layers.9.a", "model/layers.10.a", "optimizer/b/step", "a"]


@sure
@given(array_shapes(max_dims=4, max_side=6), st.integers(1, 40))
def test_blocks_make_up_the_shape_in_order_and_are_small(shape, limit):
    whole = np.arange(np.prod(shape)).reshape(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_ELEMENTS", limit)
        parts = [
            whole[tuple(slice(at, at + size) for at, size in zip(*part, strict=True))].reshape(-1)
            for part in blocks.blocks(shape)
        ]

    assert np.concatenate(parts).tolist() == list(range(whole.size))
    assert max(map(len, parts)) <= limit
