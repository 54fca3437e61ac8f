"""A step that other code computes runs the hooks of the optimizer, which the program holds."""

from __future__ import annotations

import pytest
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_core import step_with_hooks


@pytest.fixture
def optimizer():
    return SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_hooks_run_around_the_computation_as_around_step(optimizer):
    calls = []
    every = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before all")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after all")),
    ]
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    of_step, calls[:] = [*calls], []
    assert step_with_hooks(optimizer, lambda: calls.append("computed") or "result") == "result"
    for handle in every:
        handle.remove()
    assert of_step == ["before all", "before", "after", "after all"]
    assert calls == ["before all", "before", "computed", "after", "after all"]


def test_a_hook_may_change_arguments_that_the_computation_does_not_have(optimizer):
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, {**kwargs, "closure": None}))
    assert step_with_hooks(optimizer, lambda: 3) == 3


def test_a_scheduler_sees_the_step(optimizer):
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    step_with_hooks(optimizer, lambda: None)
    scheduler.step()  # torch would warn, and warnings are errors here
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_an_error_of_the_computation_is_raised(optimizer):
    def compute():
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        step_with_hooks(optimizer, compute)
