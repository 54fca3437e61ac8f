"""Batches that are read ahead: each is handed out as it was read, whatever it is made of."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from attrs import frozen
from torch.utils.data import DataLoader, IterableDataset

from accel_core import Accelerator
from accel_core.data.ahead import keep


class Pair(NamedTuple):
    first: torch.Tensor
    second: None


@frozen
class Batch:
    values: torch.Tensor


class Two(tuple):
    """A tuple with a constructor of its own."""

    __slots__ = ()

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


@dataclass
class Late:
    """A dataclass with a field that is set later."""

    values: torch.Tensor
    found: torch.Tensor = field(init=False, repr=False)


def flip_last_bit(tensor):
    tensor.reshape(-1)[-1:].view(torch.uint8)[-1] ^= 1


def filled(container, key, value):
    container[key] = value


CHANGES = {
    "zero that becomes negative": (lambda: torch.zeros(3), lambda it: it.neg_()),
    "bfloat16": (lambda: torch.zeros(3, dtype=torch.bfloat16), flip_last_bit),
    "complex": (lambda: torch.zeros(3, dtype=torch.complex64), flip_last_bit),
    "no dimension": (lambda: torch.zeros(()), lambda it: it.fill_(1)),
    "last byte of many": (lambda: torch.zeros(70_001, dtype=torch.uint8), flip_last_bit),
    "last of many, turned": (lambda: torch.zeros(300, 100).t(), lambda it: it[-1:, -1:].fill_(1)),
    "expanded": (lambda: torch.zeros(3, 1).expand(3, 4), lambda it: it[:, :1].fill_(1)),
    "leaf with a gradient": (lambda: torch.zeros(3).requires_grad_(), lambda it: it.data.fill_(1)),
    "array": (lambda: np.zeros(3), lambda it: it.fill(-0.0)),
    "array in Fortran's order": (lambda: np.zeros((2, 3), order="F"), lambda it: it.fill(1)),
    "mask of an array": (
        lambda: np.ma.masked_array([1, 2], mask=[0, 0]),
        lambda it: filled(it, 1, np.ma.masked),
    ),
    "bytes": (lambda: bytearray(2), lambda it: filled(it, 0, 1)),
    "dtype": (lambda: [torch.zeros(1, dtype=torch.int32)], lambda it: filled(it, 0, torch.zeros(1))),
    "dtype of an array": (lambda: [np.zeros(1, np.int32)], lambda it: filled(it, 0, np.zeros(1, np.float32))),
    "type of a container": (lambda: [(1,)], lambda it: filled(it, 0, [1])),
    "tensor that becomes a number": (lambda: [torch.zeros(1)], lambda it: filled(it, 0, 0.0)),
    "text": (lambda: {"text": "a"}, lambda it: filled(it, "text", "b")),
    "another key": (lambda: {"a": 1}, lambda it: filled(it, "b", 1)),
    "named tuple": (lambda: Pair(torch.zeros(1), None), lambda it: it.first.fill_(1)),
    "mapping": (lambda: UserDict(a=torch.zeros(1)), lambda it: it["a"].fill_(1)),
    "attrs class": (lambda: Batch(torch.zeros(1)), lambda it: it.values.fill_(1)),
    "tuple with its own constructor": (lambda: Two(torch.zeros(1), None), lambda it: it[0].fill_(1)),
    "field that is not set": (lambda: Late(torch.zeros(1)), lambda it: it.values.fill_(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_overwritten_is_handed_out_as_it_was_read(name):
    make, change = CHANGES[name]
    item = make()
    kept = keep(item)
    change(item)
    found = kept()
    assert type(found) is type(item)
    assert found is not item
    assert repr(found) == repr(make())


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "mask of an array"])
def test_what_stays_is_the_very_object(name):
    item = CHANGES[name][0]()
    assert keep(item)() is item


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.jagged, torch.strided])
def test_a_tensor_without_plain_memory_is_the_very_object(layout):
    """The question if it is contiguous raised."""
    if layout in (torch.strided, torch.jagged):
        item = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    else:
        item = torch.eye(3).to_sparse(layout=layout)
    assert keep([item])()[0] is item


def one_buffer_on_a_device():
    from accel_testing.simulated.device import simulate

    simulate("sim")
    accelerator = Accelerator(device="sim")

    class Filling(IterableDataset):
        def __iter__(self):
            memory = torch.zeros(2, device="sim")
            for number in range(5):
                yield memory.fill_(number)

    loader = accelerator.prepare(DataLoader(Filling(), None))
    seen = [batch[0].item() for batch in loader]
    accelerator.end_training()
    return seen


@pytest.mark.simulated
def test_one_buffer_on_a_device_gives_each_batch(run_processes):
    """A device is not waited for: its memory is copied, not compared."""
    assert run_processes(one_buffer_on_a_device, world=1) == [[0, 1, 2, 3, 4]]


def test_a_tensor_that_gradients_are_for_is_handed_out_itself():
    result = torch.zeros(3, requires_grad=True) * 2
    assert keep([result])()[0] is result
