"""A plugin written for the contract before this one still binds and still runs."""

from __future__ import annotations

import frozen_plugin
import pytest

from accel_core import hooks, implements
from accel_core.contract.bound import Steps
from accel_core.plugins.discovery import discover
from accel_core.plugins.manager import LAYERS, PluginManager

torch = pytest.importorskip("torch")


class Base:
    """What it needs from below, with today's parameters."""

    @implements(hooks.clip_gradients)
    def clip_gradients(self, unit, parameters, limit, norm_type):
        return torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type)

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit, optimizer, closure):
        optimizer.step()
        return True


@pytest.fixture
def bound():
    manager = PluginManager()
    plugin = frozen_plugin.Frozen(None, None)
    manager.add_plugin(Base(), name="base", slot="base")
    manager.add_plugin(plugin, name="frozen", slot="strategy")
    stack = manager.hooks_of(["base", "frozen"])
    plugin.below = stack.below_layer(LAYERS["strategy"])
    return plugin, stack, Steps(stack)


def test_it_is_available(toy_distribution):
    toy_distribution(
        "accel-frozen",
        entry_points={"accel_core.strategy": {"frozen": "frozen_plugin:CARD"}},
        modules={"x": ""},
    )

    assert discover({}).get("frozen").status == "available"


def test_it_trains_a_step_of_today(bound):
    plugin, stack, steps = bound
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    wrapped = stack.wrap_model(None, model)
    steps.backward(None, wrapped(torch.ones(1, 3)).sum(), True, {})
    norm = steps.clip_gradients(None, list(model.parameters()), 0.5, 2.0)
    steps.optimizer_step(None, optimizer, None)
    steps.after_step(None, optimizer, True)
    steps.zero_grad(None, optimizer, True)

    assert plugin.calls == ["wrap_model", "backward", "clip_gradients", "after_step", "zero_grad"]
    assert norm.item() == pytest.approx(2.0)
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None
