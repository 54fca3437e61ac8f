"""Plain data comes back equal and of the same type; anything else is refused with its path."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from plain_values import VALUES, same

from accel_core.errors import CheckpointError
from accel_core.storage.codec import decode, encode


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value, "state"), allow_nan=False)), "state")


@given(VALUES)
def test_plain_data_comes_back_equal_and_of_the_same_type(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 1e-323, 2**200, "\ud800", "\0"])
def test_odd_scalars(value):
    found = there_and_back(value)
    assert repr(found) == repr(value)


def test_not_a_number():
    assert math.isnan(there_and_back({"best": [math.nan]})["best"][0])


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int64,
    torch.uint16,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_tensors_of_any_dtype_and_shape(dtype, shape):
    value = torch.randint(0, 2, shape).to(dtype)
    found = there_and_back(value)
    assert found.dtype == dtype
    assert found.shape == value.shape
    assert torch.equal(
        found.view(torch.uint8) if shape else found, value.view(torch.uint8) if shape else value
    )


def test_a_view_is_stored_as_its_elements():
    value = torch.arange(12).reshape(3, 4).t()[1:]
    assert torch.equal(there_and_back(value), value)


def test_a_parameter_is_stored_as_a_tensor():
    found = there_and_back(torch.nn.Parameter(torch.ones(2)))
    assert type(found) is torch.Tensor
    assert not found.requires_grad


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.array(3, dtype=">i2"),
        np.float64(0.1),
        np.bool_(True),
        np.array(["a", "bc"]),
    ],
    ids=repr,
)
def test_arrays_and_their_scalars(value):
    found = there_and_back(value)
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert np.array_equal(found, value)


def test_torch_words():
    value = {"dtype": torch.bfloat16, "device": torch.device("meta"), "shape": torch.Size([2, 3])}
    assert same(there_and_back(value), value)


def test_pythons_generator():
    state = random.getstate()
    assert there_and_back(state) == state


@pytest.mark.parametrize(
    "value", [lambda: 0, object(), print, torch.nn.Linear(1, 1), defaultdict(object), np.array([object()])]
)
def test_what_is_not_plain_data_is_refused_with_its_path(value):
    with pytest.raises(
        CheckpointError, match=r"state\.shadow\[1\]\['k'\] cannot be stored.*is not plain data"
    ) as refused:
        encode({"shadow": [0, {"k": value, 1: 2}]}, "state")
    assert "state_dict()" in str(refused.value) or "make it a dict" in str(refused.value)


@pytest.mark.parametrize(
    "value", [torch.eye(2).to_sparse(), torch.ones(2, device="meta"), np.array([object()])]
)
def test_an_odd_tensor_or_array_is_refused_with_what_would_be_right(value):
    with pytest.raises(
        CheckpointError, match=r"is not plain data\n.* dense tensors, arrays of numbers or text"
    ):
        encode(value, "state")


def test_an_object_of_a_class_is_refused_and_what_to_return_instead_is_said():
    point = namedtuple("point", "x y")  # noqa: PYI024
    colour = IntEnum("colour", "RED")
    for value in (point(1, 2), colour.RED, type("Text", (str,), {})("a")):
        with pytest.raises(CheckpointError, match="is not plain data\n.*numbers, text"):
            encode(value, "state")


def test_a_sparse_tensor_is_refused():
    with pytest.raises(CheckpointError, match=r"state\.index .*torch\.sparse_coo"):
        encode({"index": torch.eye(2).to_sparse()}, "state")


@pytest.mark.parametrize(
    "crafted",
    [
        {"$pickle": "gASVBQ=="},
        {"$dtype": "nn"},
        {"$tensor": ["float32", [1 << 40], "AAAA"]},
        {"$tensor": ["float32", [-1], "AAAA"]},
        {"$array": ["|O", [1], "AAAAAAAAAAA="]},
        {"$dict": [[[], 1]]},
        {"$float": "one"},
        {"$stored": "../../etc/passwd"},
        {"$bytes": "?"},
        {"$range": [0, 1, 0]},
        {"$defaultdict": ["print", []]},
    ],
    ids=str,
)
def test_a_crafted_tag_is_refused_and_nothing_is_allocated_or_run(crafted):
    with pytest.raises(CheckpointError, match=r"state\.a: \$\w+ is unknown or malformed"):
        decode({"a": crafted}, "state")


@pytest.mark.parametrize("kind", [set, frozenset])
def test_equal_sets_are_encoded_alike(kind):
    one, other = kind([0, 8]), kind([8, 0])
    assert list(one) != list(other)  # by hash, which differs from process to process for text
    assert encode(one, "state") == encode(other, "state")


def test_large_tensors_go_to_the_store_and_small_ones_do_not():
    kept: dict[str, torch.Tensor] = {}
    large, small = torch.rand(1 << 15), torch.rand(4)

    def store(path, tensor):
        kept[path] = tensor
        return path

    text = json.dumps(encode({"a": [large], "b": small}, "ema", store))
    assert len(text) < 200
    found = decode(json.loads(text), "ema", kept.__getitem__)
    assert kept.keys() == {"ema.a[0]"}
    assert torch.equal(found["a"][0], large)
    assert torch.equal(found["b"], small)
