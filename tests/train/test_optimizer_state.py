"""An optimizer that has state when it is prepared keeps it, wherever its parameters go."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn

from accel_core import Accelerator, has_state


def stepped(kind, **options):
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.SGD])
def test_a_new_optimizer_has_no_state(kind):
    assert not has_state(kind(nn.Linear(2, 2).parameters(), lr=0.1))


def test_an_optimizer_made_on_the_meta_device_has_no_state():
    with torch.device("meta"):
        optimizer = torch.optim.Adagrad(nn.Linear(2, 2).parameters())
    assert not has_state(optimizer)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.Adagrad, {}), (torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_an_optimizer_that_has_stepped_or_loaded_has_state(kind, options):
    first = stepped(kind, **options)
    assert has_state(first)
    second = kind(nn.Linear(2, 2).parameters(), lr=0.1, **options)
    second.load_state_dict(first.state_dict())
    assert has_state(second)


def replacing(model):
    """Put new parameters in the place of the model's, as a transform or a device may."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            module._parameters[name] = nn.Parameter(parameter.detach().clone())
    return model


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam])
def test_the_state_follows_parameters_that_prepare_replaces(monkeypatch, kind):
    torch.manual_seed(0)
    model, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    plain.load_state_dict(model.state_dict())
    runs = []
    for each in (model, plain):
        optimizer = kind(each.parameters(), lr=0.1)
        each(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        runs.append(optimizer)
    accelerator = Accelerator(device="cpu")
    monkeypatch.setattr(nn.Linear, "to", lambda self, *_, **__: replacing(self))
    made, optimizer = accelerator.prepare(model, runs[0])
    monkeypatch.undo()
    for each, step in ((made, optimizer.step), (plain, runs[1].step)):
        each(torch.full((1, 2), 3.0)).sum().backward()
        step()
    assert torch.equal(made.weight, plain.weight)
    assert set(runs[0].state) == set(made.parameters())
    accelerator.end_training()


def test_a_program_may_put_another_state_in_the_place_of_a_prepared_optimizers():
    def moved(model, optimizer):
        for step in range(4):
            if step == 2:
                optimizer.state = defaultdict(dict)  # the momentum begins anew
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    plain = copy.deepcopy(model)
    expected = moved(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert all(map(torch.equal, moved(*prepared), expected))
    accelerator.end_training()
