"""An optimizer that was not prepared, of a model that was, on two ranks with other data."""

from __future__ import annotations

import pytest
import torch
from ddp_problem import accelerator, rank
from torch import nn

from accel_core import AccelError, GradientAccumulationPlugin


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


def test_in_the_middle_of_a_window_its_step_is_an_error(run_processes) -> None:
    for said, _ in run_processes(stepped, False, False):
        assert said.startswith("the SGD steps weights of unit 'unit0' that no prepared optimizer")
        assert "in a window of 2, whose gradients are reduced in the last micro-batch" in said


@pytest.mark.parametrize(("guarded", "each_batch"), [(True, False), (False, True)])
def test_it_steps_where_gradients_are_reduced(guarded: bool, each_batch: bool, run_processes) -> None:
    assert run_processes(stepped, guarded, each_batch) == [("", -3.0)] * 2


def stepped_beside_a_prepared_one(guarded: bool) -> tuple[str, list[float]]:
    """What an own optimizer of the second layer says in a window of two, and the weights then."""
    ours = accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model.children():
        nn.init.ones_(layer.weight)  # type: ignore[arg-type]
    own = torch.optim.SGD(model[1].parameters(), lr=1.0)
    wrapped, optimizer = ours.prepare(model, torch.optim.SGD(model[0].parameters(), lr=1.0))
    said = ""
    for _ in range(2):
        with ours.accumulate(wrapped):
            ours.backward(wrapped(torch.full((1, 1), rank() + 1.0)).sum())
            optimizer.step()
            try:
                if not guarded or ours.sync_gradients:
                    own.step()
            except AccelError as error:
                said = said or str(error)
                break
    return said, [layer.weight.item() for layer in model.children()]  # type: ignore[operator, union-attr]


def test_one_of_two_optimizers_that_was_not_prepared_steps_at_the_end_of_a_window_only(run_processes) -> None:
    for said, weights in run_processes(stepped_beside_a_prepared_one, False):
        assert "that no prepared optimizer holds, in a window of 2" in said
        assert weights == [1.0, 1.0]
    assert run_processes(stepped_beside_a_prepared_one, True) == [("", [-0.5, -0.5])] * 2
