"""fp16 tells of gradients that are changed while they are scaled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from accel_core import Accelerator

MULTIPLIES = """
from accel_core import Card, hooks, implements

class Plugin:
    def __init__(self, config, run):
        self.below = None

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit, num_items):
        for parameter in unit.named_parameters().values():
            if parameter.grad is not None:
                parameter.grad *= 2

CARD = Card(name="multiplies", slot="strategy", summary="A toy.", api_version="1.0",
            implementation="toy_multiplies:Plugin")
"""


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch):
    monkeypatch.setattr("accel_core.distributed.logging._warned", set())


@pytest.fixture
def told(caplog):
    return lambda: [each.getMessage() for each in caplog.records]


def train(accelerator, change=lambda accelerator, parameters: None, **micro_batch):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), 0.1))
    for _ in range(4):
        with accelerator.accumulate(model, **micro_batch):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            if accelerator.sync_gradients:
                change(accelerator, list(model[1].parameters()))
            optimizer.step()
            optimizer.zero_grad()


def clip(accelerator, parameters):
    nn.utils.clip_grad_norm_(parameters, 1.0)


def replace(accelerator, parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad / 2


def unscale_and_clip(accelerator, parameters):
    accelerator.unscale_gradients()
    nn.utils.clip_grad_norm_(parameters, 1.0)


def clip_by_the_accelerator(accelerator, parameters):
    accelerator.clip_grad_norm_(parameters, 1.0)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("change", [clip, replace])
def test_a_gradient_that_is_changed_is_named_once_with_the_call_before_it(
    accelerator_of, told, change, steps
):
    train(accelerator_of(mixed_precision="fp16", gradient_accumulation_steps=steps), change)
    (said,) = told()
    assert "gradient of 1.weight was changed" in said
    assert "call accelerator.unscale_gradients() before" in said


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("change", [unscale_and_clip, clip_by_the_accelerator])
def test_unscaled_gradients_may_be_changed(accelerator_of, told, change, steps):
    train(accelerator_of(mixed_precision="fp16", gradient_accumulation_steps=steps), change)
    assert told() == []


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_that_are_cleared_in_place_before_the_step_are_no_change(accelerator_of, told, steps):
    def clear(accelerator, parameters):
        for parameter in parameters:
            parameter.grad.zero_()

    train(accelerator_of(mixed_precision="fp16", gradient_accumulation_steps=steps), clear)
    assert told() == []


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_without_a_scale_gradients_may_be_changed(accelerator_of, told, precision):
    train(accelerator_of(mixed_precision=precision), clip)
    assert told() == []


def test_division_by_items_is_no_change(accelerator_of, told):
    train(accelerator_of(mixed_precision="fp16", gradient_accumulation_steps=2), items=3)
    assert told() == []


def test_reduction_at_the_end_of_a_window_is_no_change(toy_plugin, told):
    toy_plugin("multiplies", "strategy", source=MULTIPLIES)
    accelerator = Accelerator(cpu=True, strategy="multiplies", mixed_precision="fp16")
    train(accelerator)
    accelerator.end_training()
    assert told() == []


def test_it_is_told_whichever_parameters_have_gradients(accelerator_of, told):
    accelerator = accelerator_of(mixed_precision="fp16")
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), 0.1))
    for branch in model:
        accelerator.backward(branch(torch.ones(1, 2)).sum())
        if branch is model[1]:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    (said,) = told()
    assert "1.weight" in said


def drop(accelerator, parameters):
    for parameter in parameters:
        parameter.grad = None


def test_gradients_may_be_dropped(accelerator_of, told):
    train(accelerator_of(mixed_precision="fp16"), drop)
    assert told() == []


def buffer_of(parameters):
    """A buffer of gradients, which the parameters look at by views."""
    sizes = [parameter.numel() for parameter in parameters]
    buffer = torch.zeros(sum(sizes))
    look_at(buffer, parameters)
    return buffer


def look_at(buffer, parameters):
    parts = buffer.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def test_a_buffer_may_be_looked_at_by_other_views(accelerator_of, told):
    """FSDP 1 makes them anew in a forward between backward and step."""
    accelerator = accelerator_of(mixed_precision="fp16")
    net = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(net, SGD(net.parameters(), 0.1))
    buffer = buffer_of(list(net.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    look_at(buffer, list(net.parameters()))
    optimizer.step()
    assert told() == []


@pytest.mark.parametrize("clips", [False, True])
def test_the_step_of_an_optimizer_changes_no_gradients_of_another(accelerator_of, told, clips):
    """All views of a buffer, as of DDP's, have one version; a change before the first step is seen there."""
    accelerator = accelerator_of(mixed_precision="fp16")
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizers = [SGD(part.parameters(), 0.1) for part in net]
    model, first, second = accelerator.prepare(net, *optimizers)
    buffer_of(list(net.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    if clips:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    first.step()
    first.zero_grad(set_to_none=False)
    second.step()
    assert ["0.weight" in said for said in told()] == [True] * clips
