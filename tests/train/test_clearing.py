"""`zero_grad` at a boundary clears as the optimizer's own does."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer


class Counting(SGD):
    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


@pytest.fixture
def trained(accelerator):
    """Return a function: of an optimizer, (model, prepared optimizer) after a backward."""

    def make(made: type[Optimizer] = SGD):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [{"params": part.parameters()} for part in model]
        model, optimizer = accelerator.prepare(model, made(groups, lr=0.1))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        return model, optimizer

    return make


def gradients(model: nn.Module) -> list:
    return [parameter.grad for parameter in model.parameters()]


def test_all_groups_gradients_become_none(trained):
    model, optimizer = trained()

    optimizer.zero_grad()

    assert gradients(model) == [None] * 4


def test_they_become_zeros_where_asked(trained):
    model, optimizer = trained()
    before = gradients(model)

    optimizer.zero_grad(set_to_none=False)

    assert all(now is then and not now.any() for now, then in zip(gradients(model), before, strict=True))


def test_a_class_with_a_zero_grad_of_its_own_has_it_called(trained):
    model, optimizer = trained(Counting)

    optimizer.zero_grad()

    assert optimizer.cleared == 1
    assert gradients(model) == [None] * 4


def test_so_does_an_optimizer_with_one_of_its_own(trained):
    _, optimizer = trained()
    called = []
    optimizer.optimizer.zero_grad = called.append

    optimizer.zero_grad()

    assert called == [True]


def test_so_does_a_zero_grad_that_a_program_put_into_torchs_class(trained, monkeypatch):
    _, optimizer = trained()
    called = []
    monkeypatch.setattr(Optimizer, "zero_grad", lambda self, set_to_none=True: called.append(self))

    optimizer.zero_grad()

    assert called == [optimizer.optimizer]


@pytest.mark.full
def test_so_does_one_that_was_put_there_before_accel_core_came(run_command):
    program = """
from unittest.mock import Mock
from torch.optim import SGD, Optimizer
from torch import nn
Optimizer.zero_grad = Mock()
from accel_core import Accelerator
model = nn.Linear(2, 2)
model, optimizer = Accelerator(cpu=True).prepare(model, SGD(model.parameters(), lr=0.1))
optimizer.zero_grad()
Optimizer.zero_grad.assert_called_once_with(True)
"""
    ended = run_command([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


def test_so_does_that_of_another_optimizer(accelerator):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    everything, head = SGD(model.parameters(), lr=0.1), SGD(model[1].parameters(), lr=0.1)
    head.zero_grad = everything.zero_grad
    model, optimizer = accelerator.prepare(model, head)
    accelerator.backward(model(torch.ones(1, 2)).sum())

    optimizer.zero_grad()

    assert gradients(model) == [None] * 4


def test_gradients_of_parameters_outside_the_optimizer_stay(accelerator):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model, optimizer = accelerator.prepare(model, SGD(model[1].parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())

    optimizer.zero_grad()

    assert [gradient is None for gradient in gradients(model)] == [False, False, True, True]
