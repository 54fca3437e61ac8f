"""Helpers over nested structures that only Accelerate's programs use."""

from __future__ import annotations

import pickle

import torch
from accelerate.utils import convert_outputs_to_fp32, listify


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
