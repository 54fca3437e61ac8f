"""The plan of a `prepare`: kinds and groups, on plain objects, without a run or processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader

from accel_core import AccelError, ConfigError
from accel_core.contract.window import Window
from accel_core.training.names import Names
from accel_core.training.plan import plan_prepare
from accel_core.training.prepared import PreparedObjects
from accel_core.training.proxies import PreparedOptimizer

KINDS = {
    nn.Module: "model",
    torch.optim.Optimizer: "optimizer",
    ConstantLR: "scheduler",
    DataLoader: "dataloader",
}


def kind_of(thing):
    return next((kind for cls, kind in KINDS.items() if isinstance(thing, cls)), None)


def plan_beside(units, objects, placement=None, **options):
    """Plan these objects beside prepared units."""
    prepared = PreparedObjects()
    for unit in units:
        proxies = [PreparedOptimizer(optimizer, unit) for optimizer in unit.optimizers]
        prepared.add_unit(unit, zip(unit.optimizers, proxies, strict=True))
    places = [True] * len(objects) if placement is None else placement
    return plan_prepare(prepared, objects, kind_of, places, **options)


class PlainUnit:
    def __init__(self, name, model, *optimizers, strategy="single"):
        self.name, self.model, self.strategy = name, model, strategy
        self.given = self.models = self.wrapped = [model]
        self.optimizers, self.window = list(optimizers), Window()
        self.names = Names([])
        self.names.begin([model])


def linear():
    return nn.Linear(1, 1)


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def test_objects_are_told_by_kind_and_none_passes():
    model = linear()
    optimizer, loader = sgd(model), DataLoader([1])

    plan = plan_beside([], [loader, None, optimizer, model], placement=[True, True, True, False])

    assert plan.of_kind == {
        "model": [model],
        "optimizer": [optimizer],
        "scheduler": [],
        "dataloader": [loader],
    }
    assert [plan.placed[id(thing)] for thing in (loader, model)] == [True, False]


def test_each_model_is_a_group_with_the_optimizers_of_its_parameters():
    first, second, third = linear(), linear(), linear()
    of_first, of_second = sgd(first), sgd(second)

    groups = plan_beside([], [first, second, third, of_second, of_first]).groups

    assert [(group.models, group.optimizers) for group in groups] == [
        ([first], [of_first]),
        ([second], [of_second]),
        ([third], []),
    ]


def test_an_optimizer_over_several_models_makes_them_one_group():
    first, second, third = linear(), linear(), linear()
    over_two, over_the_others = sgd(first, second), sgd(second, third)

    (group,) = plan_beside([], [first, second, third, over_two, over_the_others]).groups

    assert sorted(map(id, group.models)) == sorted(map(id, (first, second, third)))
    assert group.optimizers == [over_two, over_the_others]


def test_an_optimizer_of_a_prepared_model_completes_its_unit():
    unit = PlainUnit("unit0", linear())
    optimizer = sgd(unit.model)

    (group,) = plan_beside([unit], [optimizer]).groups

    assert (group.models, group.optimizers, group.units) == ([], [optimizer], [unit])


def test_an_optimizer_over_models_of_two_prepares_is_refused_with_both_names():
    first, second, new = PlainUnit("a", linear()), PlainUnit("b", linear()), linear()

    with pytest.raises(ConfigError, match=r"SGD holds parameters of unit 'a' and unit 'b'.*\n.*in one call"):
        plan_beside([first, second], [sgd(first.model, second.model)])
    with pytest.raises(ConfigError, match=r"SGD holds parameters of unit 'a' and the new Linear.*\n.*in one"):
        plan_beside([first], [new, sgd(first.model, new)])


def test_prepared_models_and_optimizers_are_planned_no_more():
    model = linear()
    optimizer = sgd(model)

    assert plan_beside([PlainUnit("a", model, optimizer)], [model, optimizer]).groups == []


@pytest.mark.parametrize(
    ("objects", "options", "says"),
    [
        ([object()], {}, "argument 1 is a builtins.object"),
        ([sgd(linear())], {}, "no prepared model has"),
        (
            [linear(), ConstantLR(sgd(linear()))],
            {},
            "the ConstantLR schedules an optimizer",
        ),
        ([linear(), linear()], {"name": "one"}, "needs objects of exactly one unit, got 2"),
        ([linear()], {"placement": []}, "device_placement has 0 entries for 1 objects"),
    ],
    ids=["unknown", "homeless", "scheduler", "name", "placement"],
)
def test_what_is_wrong_with_the_objects_is_said(objects, options, says):
    with pytest.raises(AccelError, match=says):
        plan_beside([], objects, **options)


def test_objects_of_a_unit_have_its_strategy():
    unit = PlainUnit("a", linear())

    with pytest.raises(ConfigError, match="belong to unit 'a', prepared with 'single'"):
        plan_beside([unit], [sgd(unit.model)], strategy="other")
