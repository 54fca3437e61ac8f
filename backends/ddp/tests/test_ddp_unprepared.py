"""An optimizer that was not prepared, of a model that was, on two ranks with other data."""

from __future__ import annotations

import pytest
import torch
from ddp_problem import accelerator, rank
from torch import nn

from accel_core import AccelError, GradientAccumulationPlugin


def stepped(size: int, each_batch: bool) -> tuple[str, float]:
    """What is said of windows in which the user's own optimizer steps, and the weight then."""
    ours = accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=size, sync_each_batch=each_batch)
    )
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = ours.prepare(model)
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    said = ""
    for _ in range(4):
        with ours.accumulate(model):
            try:
                ours.backward(model(torch.full((1, 1), rank() + 1.0)).sum())
            except AccelError as error:
                said = str(error)
            own.step()
            own.zero_grad()
    return said, ours.unwrap_model(model).weight.item()


def test_in_the_middle_of_a_window_its_backward_is_an_error(run_processes) -> None:
    for said, _ in run_processes(stepped, 2, False):
        assert said.startswith("backward: no prepared optimizer steps unit 'unit0', and its gradients are")


@pytest.mark.parametrize(("size", "each_batch", "weight"), [(1, False, -6.0), (2, True, -3.0)])
def test_it_steps_where_gradients_are_reduced(
    size: int, each_batch: bool, weight: float, run_processes
) -> None:
    assert run_processes(stepped, size, each_batch) == [("", weight)] * 2


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
