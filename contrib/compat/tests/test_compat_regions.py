"""Compiling the repeated blocks of a model one by one."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import (
    compile_regions,
    extract_model_from_parallel,
    is_compiled_module,
)
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it as it traces
def test_a_twin_shares_the_weights_and_the_model_stays_as_it_is():
    model, x = Net(), torch.ones(1, 2)
    twin = compile_regions(model, backend="eager")

    assert [is_compiled_module(part) for part in (twin, *twin.blocks, twin.head)] == [False, True, True, True]
    assert not any(is_compiled_module(part) for part in model.modules())
    assert torch.equal(twin(x), model(x))
    assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}


def test_the_twin_is_unwrapped_to_its_model():
    model = Net()
    twin = compile_regions(model, backend="eager")

    assert extract_model_from_parallel(twin) is twin
    assert extract_model_from_parallel(twin, keep_torch_compile=False) is model
