"""What a strategy's card cannot follow on a prepared model is an error as a window opens."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from training_problems import FEATURES, net

from accel_core import Accelerator, AccelError

ENGINE = """
from torch import nn
from accel_core import Card, hooks, implements

class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)

class Plugin:
    def __init__(self, config, run):
        pass

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        return Wrapper(model)

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit, model, keep_compiled):
        return getattr(model, "module", model)

CARD = Card(name="engine", slot="strategy", summary="A toy.", api_version="1.0", offers=OFFERS,
            implementation="toy_engine:Plugin")
"""


def freeze(model, optimizer):
    model[0].requires_grad_(False)


def unfreeze(model, optimizer):
    model[2].bias.requires_grad_(True)


def replace_a_part(model, optimizer):
    model[0] = nn.Linear(FEATURES, model[0].out_features)


def replace_a_parameter(model, optimizer):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def replace_a_parameter_of_one_element(model, optimizer):
    model[2].bias = nn.Parameter(model[2].bias.detach().clone(), requires_grad=False)


def add_a_part(model, optimizer):
    model.append(nn.Linear(1, 1))


def regroup(model, optimizer):
    optimizer.param_groups[0]["params"].pop()


def exchange_a_grouped_parameter_of_one_element(model, optimizer):
    parameters = optimizer.param_groups[0]["params"]
    parameters[-1] = nn.Parameter(parameters[-1].detach().clone(), requires_grad=False)


CHANGES = {
    freeze: ("freezing", r"2 parameter\(s\) were trained when .* and are frozen now \(0\.weight\)"),
    unfreeze: ("unfreezing", r"1 parameter\(s\) were frozen when .* and are trained now \(2\.bias\)"),
    replace_a_part: ("replacing", r"0\.weight was replaced or added"),
    replace_a_parameter: ("replacing", r"0\.weight was replaced or added"),
    replace_a_parameter_of_one_element: ("replacing", r"2\.bias was replaced or added"),
    add_a_part: ("replacing", r"3\.weight was replaced or added"),
    regroup: ("regrouping", "parameters were added to the optimizer's groups, taken out or moved"),
    exchange_a_grouped_parameter_of_one_element: ("regrouping", "parameters were added to the optimizer's"),
}


@pytest.fixture
def prepared_by(toy_plugin):
    runs = []

    def prepare(offers):
        toy_plugin("engine", "strategy", source=ENGINE.replace("OFFERS", repr(set(offers))))
        accelerator = Accelerator(cpu=True, strategy="engine", gradient_accumulation_steps=2)
        runs.append(accelerator)
        model = net()
        model[2].bias.requires_grad_(False)
        wrapped, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        return accelerator, wrapped, optimizer

    yield prepare
    for accelerator in runs:
        accelerator.end_training()


def loss_of(model):
    return model(torch.ones(2, FEATURES)).sum()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_that_the_card_does_not_offer_is_an_error_in_the_next_backward(change, prepared_by):
    word, said = CHANGES[change]
    accelerator, model, optimizer = prepared_by({each for each, _ in CHANGES.values()} - {word})
    accelerator.backward(loss_of(model))
    optimizer.step()
    optimizer.zero_grad()

    change(accelerator.unwrap_model(model), optimizer)

    with pytest.raises(AccelError, match=f"strategy 'engine' cannot follow .*{said}"):
        accelerator.backward(loss_of(model))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_is_followed_where_the_card_offers_it(change, prepared_by):
    accelerator, model, optimizer = prepared_by({each for each, _ in CHANGES.values()})
    change(accelerator.unwrap_model(model), optimizer)
    accelerator.backward(loss_of(model))
    optimizer.step()


def test_a_losss_own_backward_is_checked_in_the_step(prepared_by):
    accelerator, model, optimizer = prepared_by(())
    unfreeze(accelerator.unwrap_model(model), optimizer)
    loss_of(model).backward()
    with pytest.raises(AccelError, match=r"are trained now \(2\.bias\)"):
        optimizer.step()


def test_a_change_within_a_window_is_checked_as_the_next_one_opens(prepared_by):
    accelerator, model, optimizer = prepared_by(())
    for number in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
        if number == 0:
            unfreeze(accelerator.unwrap_model(model), optimizer)
    with accelerator.accumulate(model), pytest.raises(AccelError, match=r"are trained now"):
        accelerator.backward(loss_of(model))


def test_add_param_group_is_refused_and_adds_nothing(prepared_by):
    accelerator, model, optimizer = prepared_by(())
    with pytest.raises(AccelError, match="cannot follow .* add_param_group"):
        optimizer.add_param_group({"params": [accelerator.unwrap_model(model)[2].bias]})
    assert len(optimizer.param_groups) == 1


def test_a_part_without_parameters_may_come_and_go(prepared_by):
    accelerator, model, optimizer = prepared_by(())
    accelerator.unwrap_model(model)[1] = nn.Sigmoid()
    accelerator.backward(loss_of(model))
    optimizer.step()


def test_a_model_that_its_strategy_leaves_as_it_is_may_change_in_a_world_of_one(toy_plugin):
    source = ENGINE.replace("OFFERS", "()").replace("return Wrapper(model)", "return model")
    toy_plugin("engine", "strategy", source=source)
    accelerator, model = Accelerator(cpu=True, strategy="engine"), net()
    wrapped, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    freeze(model, optimizer)
    accelerator.backward(loss_of(wrapped))
    optimizer.step()
    accelerator.end_training()
