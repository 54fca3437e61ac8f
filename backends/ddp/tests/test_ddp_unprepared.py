"""An optimizer that was not prepared, of a model that was, on two ranks with other data."""

from __future__ import annotations

import pytest
import torch
from ddp_problem import accelerator, rank
from torch import nn

from accel_core import AccelError, GradientAccumulationPlugin
from accel_testing import run_processes


def stepped(guarded: bool, each_batch: bool) -> tuple[str, float]:
    """What the user's own optimizer says in two windows of two, and the weight then."""
    ours = accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=each_batch)
    )
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = ours.prepare(model)
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    said = ""
    for _ in range(4):
        with ours.accumulate(model):
            ours.backward(model(torch.full((1, 1), rank() + 1.0)).sum())
            try:
                if not guarded or ours.sync_gradients:
                    own.step()
                    own.zero_grad()
            except AccelError as error:
                said = str(error)
    return said, ours.unwrap_model(model).weight.item()


def test_in_the_middle_of_a_window_its_step_is_an_error() -> None:
    for said, _ in run_processes(stepped, False, False):
        assert said.startswith("the SGD steps weights of unit 'unit0', which was prepared without an")
        assert "in a window of 2, whose gradients are reduced in the last micro-batch" in said


@pytest.mark.parametrize(("guarded", "each_batch"), [(True, False), (False, True)])
def test_it_steps_where_gradients_are_reduced(guarded: bool, each_batch: bool) -> None:
    assert run_processes(stepped, guarded, each_batch) == [("", -3.0)] * 2
