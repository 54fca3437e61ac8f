"""Gradients of a loss's own `backward`, and of steps out of turn, beside windows that count items."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD

from accel_core import AccelError

BATCH = torch.arange(12.0).reshape(4, 3)
ITEMS = 4


class Training:
    """A prepared model after one window that counted items."""

    def __init__(self, accelerator, set_to_none=True):
        torch.manual_seed(0)
        self.accelerator = accelerator
        model = nn.Linear(3, 1)
        self.model, self.optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.01))
        with self.window():
            accelerator.backward(self.loss())
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none)
        self.before = copy.deepcopy(model)

    def window(self):
        return self.accelerator.accumulate(self.model, items=ITEMS)

    def loss(self):
        return self.model(BATCH).square().sum()

    def require_step(self, share):
        """Assert that the weights moved by this share of the loss's gradient."""
        (gradient,) = torch.autograd.grad(self.before(BATCH).square().sum(), self.before.weight)
        torch.testing.assert_close(self.model.weight, self.before.weight - 0.01 * share * gradient)


@pytest.fixture(params=[True, False], ids=["none", "zeros"])
def training(accelerator, request):
    return Training(accelerator, set_to_none=request.param)


@pytest.mark.parametrize("clips", [False, True])
def test_one_after_a_window_is_not_divided_by_its_items(training, clips):
    training.loss().backward()
    if clips:
        training.accelerator.clip_grad_norm_(training.model.parameters(), 1e9)
    training.optimizer.step()
    training.require_step(1)


@pytest.mark.parametrize("clears_first", [False, True])
def test_one_inside_a_window_is_divided_though_the_step_stands_after_it(training, clears_first):
    with training.window():
        if clears_first:
            training.optimizer.zero_grad()
        training.loss().backward()
    training.optimizer.step()
    training.require_step(1 / ITEMS)


def test_one_before_a_window_does_not_join_it(training):
    training.loss().backward()
    with training.window():
        training.accelerator.backward(training.loss())
        with pytest.raises(AccelError, match="an earlier window were not cleared"):
            training.optimizer.step()


def test_sums_of_a_backward_after_the_step_join_no_means(training):
    with training.window():
        training.optimizer.step()
        training.accelerator.backward(training.loss())
    with training.accelerator.accumulate(training.model):
        training.accelerator.backward(training.loss() / ITEMS)
        with pytest.raises(AccelError, match="an earlier window were not cleared"):
            training.optimizer.step()


def test_gradients_of_its_own_are_not_divided_by_a_second_step(training):
    with training.window():
        training.loss().backward()
        training.optimizer.step()
        with pytest.raises(AccelError, match="would be divided again"):
            training.optimizer.step()


def test_a_backward_after_the_step_adds_no_sums_to_what_was_divided(training):
    with training.window():
        training.accelerator.backward(training.loss())
        training.optimizer.step()
        training.accelerator.backward(training.loss())
        with pytest.raises(AccelError, match="had divided by the window's items"):
            training.optimizer.step()


def test_a_second_loss_is_divided_where_the_first_ones_gradients_were_cleared(training):
    with training.window():
        training.accelerator.backward(training.loss())
        training.optimizer.zero_grad()
        training.accelerator.backward(training.loss())
    training.optimizer.step()
    training.require_step(1 / ITEMS)


def test_the_values_of_cleared_gradients_are_not_waited_for(training, monkeypatch):
    monkeypatch.delattr("accel_core.training.step_state.is_nonzero")
    with training.window():
        training.accelerator.backward(training.loss())
        training.optimizer.step()
    training.require_step(1 / ITEMS)
