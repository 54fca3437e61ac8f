"""Parameters that train and that no prepared optimizer holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from accel_core import Accelerator, AccelError


def left_out(caplog):
    return [each.getMessage() for each in caplog.records if "in no optimizer" in each.getMessage()]


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_those_beside_an_optimizer_are_one_warning_at_prepare(accelerator_of, caplog, precision):
    model = net()

    accelerator_of(mixed_precision=precision).prepare(model, SGD(model[1].parameters(), lr=0.1))

    (told,) = left_out(caplog)
    assert "2 parameter(s) of unit unit0" in told
    assert "(0.weight, 0.bias)" in told
    assert "requires_grad_(False)" in told


@pytest.mark.parametrize("kind", ["all", "frozen", "no optimizer"])
def test_nothing_is_told_where_all_is_held_or_frozen_or_only_evaluated(accelerator_of, caplog, kind):
    model = net()
    if kind == "frozen":
        model[0].requires_grad_(False)
    optimizers = (
        [] if kind == "no optimizer" else [SGD([p for p in model.parameters() if p.requires_grad], 0.1)]
    )

    accelerator_of().prepare(model, *optimizers)

    assert left_out(caplog) == []


def stepped_by_a_stranger(size):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=size)
    model = accelerator.prepare(nn.Linear(1, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
                optimizer.step()
                optimizer.zero_grad()
        return model.module.weight.item()
    except AccelError as error:
        return str(error)
    finally:
        accelerator.end_training()


@pytest.mark.needs("accel-ddp")
def test_an_optimizer_that_was_not_prepared_may_step_what_each_backward_reduces(run_processes):
    first, second = run_processes(stepped_by_a_stranger, 1)
    assert isinstance(first, float)
    assert first == second


@pytest.mark.needs("accel-ddp")
def test_where_its_window_would_leave_gradients_unreduced_the_backward_is_refused(run_processes):
    for told in run_processes(stepped_by_a_stranger, 2):
        assert "no prepared optimizer steps unit 'unit0'" in told
        assert "prepare the optimizer too" in told
