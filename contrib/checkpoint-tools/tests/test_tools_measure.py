"""Tensors are compared by their values, however their bytes are cut into boxes and blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from accel_checkpoint_tools import blocks
from accel_checkpoint_tools.measure import Tolerance, measure
from accel_checkpoint_tools.text import in_order
from accel_core import Box, Stored

EXACT = Tolerance()
sure = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
DTYPES = [*FLOATS, "int64", "uint8", "uint16", "uint64", "bool", "complex64", "float8_e8m0fnu"]


class Memory:
    """A file in memory."""

    def __init__(self, content):
        self.content = bytearray(content)

    def read(self, start, into):
        assert start + len(into) <= len(self.content)
        into[:] = self.content[start : start + len(into)]

    def tensor(self, dtype, shape, start):
        size = int(np.prod(shape)) * getattr(torch, dtype).itemsize
        part = torch.frombuffer(self.content, dtype=torch.uint8, count=size, offset=start)
        return part.clone().view(getattr(torch, dtype)).reshape(shape)


def stored(tensor, cuts=None):
    """Return the tensor as a checkpoint has it, in these (offset, shape) boxes."""
    boxes, content = [], b""
    for offset, shape in cuts or [((0,) * tensor.ndim, tuple(tensor.shape))]:
        part = tensor[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
        boxes.append((Box(offset, shape), len(content)))
        content += part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype, file = str(tensor.dtype).removeprefix("torch."), Memory(content)
    kept = {box: (file, start) for box, start in boxes}
    return Stored("like_param", tuple(tensor.shape), dtype, None, kept)


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


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn_x2"])
def test_elements_that_torch_converts_to_no_numbers_are_counted_and_not_measured(dtype):
    a, b = (
        stored(torch.tensor([0, 7, value], dtype=torch.uint8), [((0,), (2,)), ((2,), (1,))])
        for value in (8, 9)
    )

    found = measure(evolve(a, dtype=dtype), evolve(b, dtype=dtype), EXACT)

    assert (found.different, found.elements, found.max_abs) == (1, 3, None)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_empty_tensors_are_compared(shape):
    assert measure(stored(torch.ones(shape)), stored(torch.ones(shape)), EXACT) is None


def test_a_scalar_that_differs_is_found():
    assert measure(stored(torch.tensor(1.0)), stored(torch.tensor(3.0)), EXACT).relative == 2


def test_of_large_rows_only_the_parts_that_are_needed_are_read(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1 << 20)
    values = torch.arange(2 << 23, dtype=torch.int32).reshape(2, 1 << 23)
    one, read = stored(values), []
    file, _ = one.boxes[Box((0, 0), (2, 1 << 23))]
    plain = file.tensor
    monkeypatch.setattr(file, "tensor", lambda *place: read.append(place) or plain(*place))

    assert measure(one, stored(values), EXACT) is None
    assert sum(int(np.prod(shape)) for _, shape, _ in read) == values.numel()


def test_numbers_in_names_are_ordered_as_numbers():
    names = ["layers.10.a", "layers.9.b", "layers.9.a"]
    assert sorted(names, key=in_order) == names[::-1]


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
