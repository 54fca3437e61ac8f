"""Helpers over nested structures that only Accelerate's programs use."""

from __future__ import annotations

import pickle
from collections import UserDict

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32, listify, pad_across_processes, send_to_device, set_seed
from peers import said

COPIED = """
import json, torch
from accelerate import Accelerator
from accelerate.utils.operations import copy_tensor_to_devices, gather_tensor_shape

accelerator = Accelerator(cpu=True)
seen = []
for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
    mine = torch.tensor([[1, 0, 1]], dtype=dtype) if accelerator.process_index == 1 else None
    shape, kind = gather_tensor_shape(mine)
    copied = copy_tensor_to_devices(mine)
    seen.append([list(shape), kind == copied.dtype == dtype, copied.tolist()])
print(json.dumps(seen))
"""


class Module(torch.nn.Module):
    def forward(self, x):
        """Twice x."""
        return {"out": 2 * x, "ids": torch.tensor([1])}


def test_listify_gives_numbers_in_place_of_tensors():
    data = {"a": torch.tensor([[1, 2]]), "b": (torch.tensor(0.5, requires_grad=True), "text")}
    assert listify(data) == {"a": [[1, 2]], "b": (0.5, "text")}
    assert listify(torch.tensor([1.5], dtype=torch.bfloat16)) == [1.5]


def test_gradients_flow_through_converted_outputs():
    forward = convert_outputs_to_fp32(Module().forward)
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    out = forward(x)["out"]
    assert out.dtype is torch.float32
    out.sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_a_function_with_converted_outputs_is_named_as_before_and_can_be_pickled():
    forward = convert_outputs_to_fp32(Module().forward)
    assert (forward.__name__, forward.__doc__) == ("forward", "Twice x.")
    again = pickle.loads(pickle.dumps(forward))
    assert again(torch.ones(1, dtype=torch.float16))["out"].dtype is torch.float32


def test_that_nested_tensors_are_not_padded_is_said_at_the_programs_line():
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.warns(UserWarning, match="Cannot pad nested tensors") as told:
        assert pad_across_processes(nested) is nested
    assert [warning.filename for warning in told] == [__file__]


def test_the_tensor_that_one_rank_has_comes_to_all_in_its_dtype(run_processes):
    numbers, truths = [[1, 0, 1]], [[True, False, True]]
    assert said(run_processes, COPIED, ours=True, processes=2) == [
        [[1, 3], True, copied] for copied in (numbers, numbers, numbers, truths)
    ]


class Encoding(UserDict):
    """As transformers' BatchEncoding: more than its items, and not made from these alone."""

    def __init__(self, data, encodings):
        super().__init__(data)
        self.encodings = encodings

    def to(self, device):
        raise AssertionError("moves the skipped items too")


def test_a_batch_keeps_all_that_it_is_where_keys_are_skipped():
    ids = torch.ones(1)
    sent = send_to_device(Encoding({"ids": ids, "text": ids}, "kept"), "meta", skip_keys="text")
    assert (sent["ids"].device.type, sent["text"].device.type, sent.encodings) == ("meta", "cpu", "kept")


def test_ranks_have_one_seed_where_device_specific_is_none():
    set_seed(3, device_specific=None)
    first = torch.rand(1)
    set_seed(3)

    assert torch.equal(torch.rand(1), first)
