"""A strategy that makes one thing of a unit's model, optimizer and scheduler, as engines do."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from training_problems import FEATURES, net

from accel_core import Accelerator, AccelError, ConfigError

ENGINE = """
from torch import nn
from accel_core import Card, hooks, implements

class Engine(nn.Module):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module, self.optimizer = module, optimizer

    def forward(self, x):
        return self.module(x)

class Plugin:
    def __init__(self, config, run):
        self.run, self.calls = run, []

    @implements(hooks.prepare_unit)
    def prepare_unit(self, unit, loaders):
        unit.config = {"models": len(unit.models), "loaders": len(loaders)}
        self.calls.append((len(unit.wrapped), len(unit.optimizers), len(unit.schedulers)))
        for scheduler in unit.schedulers:
            scheduler.wrapped_by = unit
        if unit.wrapped:
            unit.wrapped[0].optimizer = unit.optimizers[0]
        else:
            unit.wrapped.append(Engine(unit.models[0], unit.optimizers[0] if unit.optimizers else None))

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit, model, keep_compiled):
        return getattr(model, "module", model)

CARD = Card(name="engine", slot="strategy", summary="A toy.", api_version="1.0",
            implementation="toy_engine:Plugin")
"""


@pytest.fixture
def accelerator(toy_plugin):
    toy_plugin("engine", "strategy", source=ENGINE)
    made = Accelerator(cpu=True, strategy="engine")
    yield made
    made.end_training()


def parts():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1.0)


def test_the_engine_gets_all_objects_of_one_call(accelerator):
    model, optimizer, rate = parts()
    engine, prepared, scheduler = accelerator.prepare(model, optimizer, rate)
    (unit,) = accelerator.run.units
    assert unit.plugin.calls == [(0, 1, 1)]
    assert unit.config == {"models": 1, "loaders": 0}
    assert engine.optimizer is optimizer
    assert accelerator.unwrap_model(engine) is model
    assert scheduler.wrapped_by is unit
    before = model[0].weight.detach().clone()
    accelerator.backward(engine(torch.ones(2, FEATURES)).sum())
    prepared.step()
    assert not torch.equal(before, model[0].weight)


def test_a_late_optimizer_is_given_to_the_same_engine(accelerator):
    model, optimizer, rate = parts()
    engine = accelerator.prepare(model)
    accelerator.prepare(optimizer)
    accelerator.prepare(rate)
    (unit,) = accelerator.run.units
    assert unit.plugin.calls == [(0, 0, 0), (1, 1, 0)]
    assert engine.optimizer is optimizer
    assert unit.schedulers == [rate]


@pytest.mark.parametrize("use", ["a closure", "a part", "another norm", "a clamped part"])
def test_what_the_card_does_not_offer_is_refused(accelerator, use):
    model, optimizer, _ = parts()
    engine, prepared = accelerator.prepare(model, optimizer)
    accelerator.backward(engine(torch.ones(2, FEATURES)).sum())
    accelerator.clip_grad_norm_(engine.parameters(), 1.0)
    first = [next(model.parameters())]
    calls = {
        "a closure": lambda: prepared.step(lambda: None),
        "a part": lambda: accelerator.clip_grad_norm_(first, 1.0),
        "another norm": lambda: accelerator.clip_grad_norm_(engine.parameters(), 1.0, 1),
        "a clamped part": lambda: accelerator.clip_grad_value_(first, 1.0),
    }
    with pytest.raises(AccelError, match=r"strategy 'engine' .*\n.*choose a strategy that can: .*single"):
        calls[use]()


def test_a_second_optimizer_is_refused_at_prepare(accelerator):
    model = net()
    first, second = (SGD([each], lr=0.1) for each in list(model.parameters())[:2])
    with pytest.raises(ConfigError, match="strategy 'engine' takes one optimizer per unit"):
        accelerator.prepare(model, first, second)


AROUND = (
    ENGINE[: ENGINE.index("    @implements(hooks.prepare_unit)")]
    + """
    @implements(hooks.prepare_unit)
    def prepare_unit(self, unit, loaders):
        before = len(unit.wrapped), len(unit.optimizers), len(unit.schedulers)
        self.below.prepare_unit(unit, loaders)
        self.calls.append((before, len(unit.wrapped)))

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        return Engine(model, None)

    @implements(hooks.wrap_optimizer)
    def wrap_optimizer(self, unit, optimizer):
        self.wrapped = [*getattr(self, "wrapped", []), optimizer]
        return optimizer

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit, model, keep_compiled):
        return getattr(model, "module", model)

CARD = Card(name="engine", slot="strategy", summary="A toy.", api_version="1.0",
            implementation="toy_engine:Plugin")
"""
)


def by_torch(model, optimizer, rate):
    for number in range(3):
        model(torch.full((2, FEATURES), 1.0 + number)).square().mean().backward()
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("late", [False, True])
def test_a_strategy_around_the_base_wraps_each_object_by_its_own_hooks(toy_plugin, late):
    toy_plugin("engine", "strategy", source=AROUND)
    expected = by_torch(*parts())
    accelerator = Accelerator(cpu=True, strategy="engine")
    model, optimizer, rate = parts()
    if late:
        wrapped = accelerator.prepare(model)
        prepared, scheduler = accelerator.prepare(optimizer, rate)
    else:
        wrapped, prepared, scheduler = accelerator.prepare(model, optimizer, rate)
    (unit,) = accelerator.run.units
    plugin = unit.plugin
    for number in range(3):
        accelerator.backward(wrapped(torch.full((2, FEATURES), 1.0 + number)).square().mean())
        prepared.step()
        scheduler.step()
        prepared.zero_grad()
    accelerator.end_training()

    assert type(wrapped).__name__ == "Engine"
    assert plugin.calls == ([((0, 0, 0), 1), ((1, 1, 1), 1)] if late else [((0, 1, 1), 1)])
    assert plugin.wrapped == [optimizer]
    assert unit.schedulers == [rate]
    assert all(map(torch.equal, model.parameters(), expected))
