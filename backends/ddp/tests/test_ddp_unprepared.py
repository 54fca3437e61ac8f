"""An optimizer that was not prepared, of a model that was, on two ranks with other data."""

from __future__ import annotations

import pytest
import torch
from ddp_problem import accelerator, rank
from torch import nn

from accel_core import GradientAccumulationPlugin


def stepped(guarded: bool, each_batch: bool) -> float:
    """The weight after two windows of two, in which the user's own optimizer steps."""
    ours = accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=each_batch)
    )
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = ours.prepare(model)
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(4):
        with ours.accumulate(model):
            ours.backward(model(torch.full((1, 1), rank() + 1.0)).sum())
            if not guarded or ours.sync_gradients:
                own.step()
                own.zero_grad()
    return ours.unwrap_model(model).weight.item()


@pytest.mark.parametrize(("guarded", "each_batch"), [(True, False), (False, True)])
def test_it_steps_where_gradients_are_reduced(guarded: bool, each_batch: bool, run_processes) -> None:
    assert run_processes(stepped, guarded, each_batch) == [-3.0] * 2


def stepped_beside_a_prepared_one() -> list[float]:
    """Weights after a window of two, in which an own optimizer steps the second layer at the end."""
    ours = accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model.children():
        nn.init.ones_(layer.weight)  # type: ignore[arg-type]
    own = torch.optim.SGD(model[1].parameters(), lr=1.0)
    wrapped, optimizer = ours.prepare(model, torch.optim.SGD(model[0].parameters(), lr=1.0))
    for _ in range(2):
        with ours.accumulate(wrapped):
            ours.backward(wrapped(torch.full((1, 1), rank() + 1.0)).sum())
            optimizer.step()
            if ours.sync_gradients:
                own.step()
    return [layer.weight.item() for layer in model.children()]  # type: ignore[operator, union-attr]


def test_it_steps_beside_a_prepared_one(run_processes) -> None:
    assert run_processes(stepped_beside_a_prepared_one) == [[-0.5, -0.5]] * 2
