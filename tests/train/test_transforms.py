"""Plugins change models in closed phases; names stay those of the user's model; nothing is half done."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from training_problems import FEATURES, net

from accel_core import Accelerator, AccelError, ConfigError

EXTENSION = """
from functools import partial
import torch
from torch import nn
from accel_core import Card, hooks, implements

class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.extra = inner, nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.inner(x) + self.extra

class Plugin:
    def __init__(self, config, run):
        self.run, self.seen = run, []

    @implements(hooks.refuse_unit)
    def refuse_unit(self, unit, models, optimizers):
        wrong = [model for model in models if len(model) == 1]
        return [f"{NAME} wants no model of one layer\\nadd layers"] if wrong else []

    @implements(hooks.model_init_context)
    def model_init_context(self, unit_name):
        return torch.device("meta") if NAME == "one" and unit_name != "whole" else None

    @implements(hooks.autocast)
    def autocast(self, unit):
        return partial(torch.autocast, "cpu", cache_enabled=False) if NAME == "one" else None

    @implements(hooks.transform_model)
    def transform_model(self, unit, model, phase):
        self.seen.append(phase)
        if phase == PHASE:
            ACTION
        return model

CARD = Card(name=NAME, slot="extension", summary="A toy.", api_version="1.0",
            implementation=f"toy_{NAME}:Plugin")
"""
WRAPS = "model = Wrapped(model)"
REPLACES = "model[0].weight = nn.Parameter(model[0].weight.detach().clone())"
GIVES = "unit.optimizers[0].param_groups[0]['params'][0] = model[0].weight"
GIVES_ANOTHER = "unit.optimizers[0].param_groups[0]['params'][0] = nn.Parameter(torch.ones(1))"
TAKES_AWAY = "model = nn.Sequential(nn.Linear(6, 1))"


@pytest.fixture
def accelerator_with(toy_plugin, monkeypatch):
    made = []

    def make(phase="convert", action="pass", names=("one",), **options):
        for name in names:
            source = EXTENSION.replace("NAME", repr(name)).replace("PHASE", repr(phase))
            toy_plugin(name, "extension", source=source.replace("ACTION", action))
        monkeypatch.setenv("ACCEL__EXTENSIONS", ",".join(names))
        made.append(Accelerator(cpu=True, **options))
        return made[-1]

    yield make
    for accelerator in made:
        accelerator.end_training()


def test_the_phases_come_in_order_once_a_model(accelerator_with):
    accelerator = accelerator_with()
    accelerator.prepare(net())
    seen = accelerator.run.plugins["one"].seen
    assert seen == ["quantize", "convert", "parallelize", "checkpoint", "compile", "post"]


@pytest.mark.parametrize("phase", ["quantize", "convert", "parallelize", "checkpoint", "post"])
def test_a_transform_that_wraps_keeps_the_names_of_what_it_wraps(accelerator_with, phase):
    accelerator = accelerator_with(phase, WRAPS)
    model = net()
    names = [name for name, _ in model.named_parameters()]
    optimizer = SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert type(prepared).__name__ == "Wrapped"
    assert sorted(accelerator.run.units[0].named_parameters()) == sorted([*names, "extra"])
    assert accelerator.prepare(model) is prepared
    accelerator.backward(prepared(torch.ones(2, FEATURES)).sum())
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_an_optimizer_follows_a_parameter_replaced_under_its_name(accelerator_with):
    accelerator = accelerator_with("convert", REPLACES)
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_a_transform_may_give_the_optimizer_the_new_parameter_itself(accelerator_with):
    accelerator = accelerator_with("convert", f"{REPLACES}; {GIVES}")
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    accelerator.backward(model(torch.ones(2, FEATURES)).sum())
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_a_transform_that_gives_the_optimizer_a_parameter_of_no_model_is_told(accelerator_with):
    accelerator = accelerator_with("convert", GIVES_ANOTHER)
    model = net()
    with pytest.raises(AccelError, match="the SGD holds a parameter of no model"):
        accelerator.prepare(model, SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("phase", ["convert", "post"])
def test_a_transform_sees_the_optimizers_that_are_prepared_with_the_model(accelerator_with, phase):
    accelerator = accelerator_with(phase, "self.held = list(unit.optimizers)")
    model, teacher = net(), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)
    assert accelerator.run.plugins["one"].held == [optimizer]
    accelerator.prepare(teacher)
    assert accelerator.run.plugins["one"].held == []


def test_an_optimizer_of_a_parameter_that_is_gone_says_so(accelerator_with):
    accelerator = accelerator_with("convert", TAKES_AWAY)
    model = net()
    with pytest.raises(AccelError, match=r"SGD holds 2\.weight, which a transform .*\n.*prepared model's"):
        accelerator.prepare(model, SGD(model.parameters(), lr=0.1))


def test_tied_weights_stay_tied_by_name_under_a_wrapper(accelerator_with):
    accelerator = accelerator_with("convert", WRAPS)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    accelerator.prepare(model)
    (unit,) = accelerator.run.units
    assert sorted(unit.named_parameters()) == ["0.weight", "extra"]
    assert unit.aliases == {"1.weight": "0.weight"}


def test_a_refused_model_leaves_all_others_as_they_were(accelerator_with):
    accelerator = accelerator_with()
    a, b = accelerator.prepare(net(0), net(1))
    units = list(accelerator.run.units)
    one_layer = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="one wants no model of one layer\nadd layers"):
        accelerator.prepare(net(2), one_layer, SGD(one_layer.parameters(), lr=0.1))
    assert accelerator.run.units == units
    assert [unit.models for unit in units] == [[a], [b]]
    assert accelerator.run.plugins["one"].seen.count("post") == 2


def test_autocast_contexts_of_several_plugins_are_entered_together(accelerator_with):
    accelerator = accelerator_with(mixed_precision="bf16")
    model = accelerator.prepare(net())
    seen = []
    model[0].register_forward_hook(
        lambda *_: seen.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()))
    )
    model(torch.ones(1, FEATURES))
    assert seen == [(torch.bfloat16, False)]
    assert not torch.is_autocast_enabled("cpu")


def test_a_plugin_says_where_models_are_built_for_a_unit(accelerator_with):
    accelerator = accelerator_with(names=("one", "two"))

    with accelerator.model_init_context():
        built = nn.Linear(1, 1)
    with accelerator.model_init_context(name="whole"):
        whole = nn.Linear(1, 1)

    assert (built.weight.is_meta, whole.weight.is_meta) == (True, False)
    assert not nn.Linear(1, 1).weight.is_meta
