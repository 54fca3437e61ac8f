"""Names of parameters: kept through wrapping, also of parameters that are gone or were replaced."""

from __future__ import annotations

import sys
import threading
import weakref

import pytest
import torch
from torch import nn

from accel_core.training.names import Names


def tied():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    return model


def named(*models):
    names = Names([])
    names.begin(models)
    return names


def replace_parameters(model):
    for module in model.modules():
        for name, parameter in [*module._parameters.items()]:
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))


def test_a_name_is_the_one_in_the_users_model_and_a_tied_weight_has_its_first():
    model = tied()
    names = named(model)
    assert names.of(model[1].weight) == "0.weight"
    assert names.aliases == {"1.weight": "0.weight"}


def test_each_name_of_several_models_has_the_number_of_its_model():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    names = named(first, second)
    assert (names.of(first.bias), names.of(second.bias)) == ("0.bias", "1.bias")


def test_a_wrapper_leaves_names_as_they_are():
    model = nn.Linear(1, 1)
    names = named(model)
    names.replace(0, nn.Sequential(model))
    names.end([])
    assert [name for name, _ in names.all()] == ["weight", "bias"]
    assert names.qualify(0, "0.weight") == "weight"


def test_a_parameter_that_was_replaced_has_its_name_and_is_not_kept_alive():
    model = nn.Linear(1, 1)
    before = model.weight
    names, gone = named(model), weakref.ref(model.bias)
    replace_parameters(model)
    names.end([])
    assert (names.of(before), names.of(model.weight), names.of(nn.Parameter(torch.ones(1)))) == (
        "weight",
        "weight",
        None,
    )
    assert (gone(), names.outlived()) == (None, {"weight"})


def test_an_object_that_has_the_id_of_a_parameter_that_is_gone_is_not_taken_for_it():
    model, data = nn.Linear(1, 1, bias=False), torch.zeros(1)
    names, identity, others = named(model), id(model.weight), []
    replace_parameters(model)
    names.end([])
    while not others or id(others[-1]) != identity:
        assert len(others) < 10_000, "no object took the place"
        others.append(nn.Parameter(data))
    assert names.of(others[-1]) is None


@pytest.mark.parametrize("asked", [lambda names: names.outlived(), lambda names: names.trains_more_than([])])
def test_parameters_may_go_while_names_are_asked(asked, monkeypatch):
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(2_000)])
    held = [*model]
    names = named(model)
    replace_parameters(model)
    names.end([])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    dropping = threading.Thread(target=held.clear)
    try:
        dropping.start()
        while dropping.is_alive():
            asked(names)
    finally:
        sys.setswitchinterval(interval)
        dropping.join()
    assert names.outlived() == set()


def test_parameters_that_train_are_counted_by_name():
    model = nn.Linear(1, 1)
    names = named(model)
    replace_parameters(model)
    names.end(["weight", "bias"])
    assert not names.trains_more_than(model.parameters())
    assert names.trains_more_than([model.bias])
    model.weight.requires_grad_(False)
    assert not names.trains_more_than([model.bias])


def test_a_tie_that_was_cut_is_dropped_and_one_that_a_strategy_keeps_in_several_is_not():
    cut, split = tied(), tied()
    of_cut, of_split = named(cut), named(split)
    replace_parameters(split)
    of_cut.end([])
    of_split.end([])
    replace_parameters(cut)
    of_cut.drop_cut_ties()
    of_split.drop_cut_ties()
    assert (of_cut.aliases, of_split.aliases) == ({}, {"1.weight": "0.weight"})
