"""What each rank of test_unprepared does, and a toy strategy that reduces when an optimizer steps."""

from __future__ import annotations

import torch
from torch import nn

from accel_core import Accelerator, AccelError, hooks, implements

CARD = """
from accel_core import Card
CARD = Card(name="tardy", slot="strategy", summary="A toy.", api_version="1.0",
            implementation="unprepared_job:Tardy")
"""


class Tardy:
    below: object

    def __init__(self, config, run):
        self.run = run

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        for layer in [each for each in model.modules() if isinstance(each, nn.Linear)]:
            layer.weight = nn.Parameter(layer.weight.detach().clone())  # as what shards a weight does
        return model

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit, num_items):
        for parameter in unit.named_parameters().values():
            self.run.collectives("world").all_reduce(parameter.grad, "mean")
        self.below.reduce_gradients(unit, num_items)


def stepped(strategy, made_before):
    """What the user's own optimizer says, and the weight after that and after steps of it, prepared."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    own = torch.optim.SGD(model.parameters(), lr=1.0) if made_before else None
    model = accelerator.prepare(model)
    own = own or torch.optim.SGD(model.parameters(), lr=1.0)

    def backward():
        accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())

    backward()
    try:
        own.step()
        said = ""
    except AccelError as error:
        said = str(error)
    first = model.weight.item()
    other = nn.Linear(1, 1)  # somebody else's
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    model.zero_grad()
    prepared = accelerator.prepare(own)
    backward()
    prepared.step()
    accelerator.free_memory()
    own.step()  # nobody's any more
    return said, first, model.weight.item()


def stepped_in_the_place_of_another():
    """Step a parameter that has the address of one that wrapping replaced; whether there was one."""
    accelerator = Accelerator(cpu=True, strategy="tardy")
    model = nn.Linear(1, 1, bias=False)
    gone = id(model.weight)
    model = accelerator.prepare(model)
    others = []
    while len(others) < 10_000 and gone not in map(id, others[-1:]):
        others.append(nn.Parameter(torch.ones(1)))
    others[-1].grad = torch.ones(1)
    torch.optim.SGD(others[-1:], lr=1.0).step()
    return gone == id(others[-1]), others[-1].item()


class Twice(torch.optim.Optimizer):
    """An optimizer that steps by another one, as Lookahead does."""

    def __init__(self, parameters):
        parameters = list(parameters)
        self.inner = torch.optim.SGD(parameters, lr=1.0)
        super().__init__(parameters, dict(self.inner.defaults))
        self.inner.param_groups = self.param_groups

    def step(self, closure=None):
        self.inner.step()


def stepped_beside_a_prepared_one(strategy):
    """What an optimizer of the second layer says, and both layers' weights after a step of both."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)
    own = torch.optim.SGD(model[1].parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, Twice(model[0].parameters()))
    accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
    optimizer.step()
    try:
        own.step()
        said = ""
    except AccelError as error:
        said = str(error)
    return said, [layer.weight.item() for layer in accelerator.unwrap_model(model)]
