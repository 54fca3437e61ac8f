"""Structures keep their types, whatever is done to their tensors."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from accel_core import ops


class Point(NamedTuple):
    x: Any
    y: Any


class Pair(tuple):
    __slots__ = ()


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    name: str = "output"
    known: int = field(default=0, init=False)


@dataclass(frozen=True)
class Sample:
    pixels: torch.Tensor
    label: int = 3


class Encoding(UserDict):
    """As tokenizers give them: a dict with something beside its items."""

    def __init__(self, data, note):
        super().__init__(data)
        self.note = note

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.data.items()}, self.note)


T = torch.ones(2)
STRUCTURES = [
    [T, T],
    (T, [T]),
    Pair((T, T)),
    Point(T, {"deep": T}),
    {"a": T, "b": (T,)},
    OrderedDict(b=T, a=T),
    defaultdict(list, a=T),
    MappingProxyType({"a": T}),
    Output(T),
    Sample(T),
    Encoding({"ids": T}, "kept"),
]


def tensors_of(data):
    found = []
    ops.recursively_apply(found.append, data)
    return found


@pytest.mark.parametrize("data", STRUCTURES, ids=lambda data: type(data).__name__)
def test_applying_a_function_keeps_the_type(data):
    doubled = ops.recursively_apply(lambda tensor: tensor * 2, data)
    assert type(doubled) is type(data)
    assert len(tensors_of(doubled)) == len(tensors_of(data)) > 0
    assert all(torch.equal(tensor, T * 2) for tensor in tensors_of(doubled))
    assert all(torch.equal(tensor, T) for tensor in tensors_of(data))


def test_what_is_no_child_is_kept():
    assert ops.slice_tensors(Encoding({"ids": T}, "kept"), slice(1)).note == "kept"
    assert ops.slice_tensors(defaultdict(list, a=T), slice(1)).default_factory is list
    assert ops.slice_tensors(Output(T, "mine"), slice(1)).name == "mine"
    assert ops.slice_tensors(Sample(T, 5), slice(1)).label == 5


def test_other_leaves_stay_unless_they_are_refused():
    assert ops.recursively_apply(lambda _: 0, {"a": T, "b": "text", "c": None}) == {
        "a": 0,
        "b": "text",
        "c": None,
    }
    with pytest.raises(TypeError, match="takes nested tensors, but found a leaf of type str"):
        ops.recursively_apply(torch.neg, [T, "text"], error_on_other_type=True)


def test_arguments_and_the_test_of_leaves_are_passed_on():
    assert ops.recursively_apply(int.__add__, [1, {"a": 2}], 5, test_type=lambda x: isinstance(x, int)) == [
        6,
        {"a": 7},
    ]


def test_concatenate_joins_equal_structures():
    joined = ops.concatenate([Point(T, [T]), Point(T + 1, [T])])
    assert joined.x.tolist() == [1, 1, 2, 2]
    assert type(joined) is Point
    assert ops.concatenate([torch.ones(2, 1), torch.zeros(2, 1)], dim=1).shape == (2, 2)
    assert ops.concatenate([T]) is T
    with pytest.raises(TypeError, match="differ"):
        ops.concatenate([[T], [T, T]])


def test_find_batch_size_is_that_of_the_first_tensor_with_a_dimension():
    assert ops.find_batch_size({"loss": torch.tensor(1.0), "logits": [torch.ones(5, 2)]}) == 5
    with pytest.raises(TypeError, match="no tensor with a first dimension"):
        ops.find_batch_size({"a": "text"})


def test_send_to_device_uses_a_method_to_and_leaves_skipped_keys():
    sent = ops.send_to_device({"a": Encoding({"ids": T}, "kept"), "b": (T, "text")}, "meta")
    assert (sent["a"]["ids"].device.type, sent["a"].note) == ("meta", "kept")
    assert (sent["b"][0].device.type, sent["b"][1]) == ("meta", "text")
    packed = torch.nn.utils.rnn.pack_sequence([T])
    sent = ops.send_to_device([{"a": T, "b": T, "c": packed}], "meta", skip_keys="b")
    assert (sent[0]["a"].device.type, sent[0]["b"].device.type) == ("meta", "cpu")
    assert sent[0]["c"].data.device.type == "meta"


def test_an_object_moves_without_blocking_where_its_method_can():
    class Movable:
        def to(self, device, *, non_blocking=False):
            return device, non_blocking

    class Plain:
        def to(self, device):
            return device

    assert ops.send_to_device([Movable(), Plain()], "meta", non_blocking=True) == [("meta", True), "meta"]
