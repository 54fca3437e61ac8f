"""Extensions refine the batches that loaders give, and surround each micro-batch they are shown."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader
from training_problems import FEATURES, net

from accel_core import Accelerator

EXTENSION = """
from contextlib import contextmanager
import torch
from accel_core import Card, hooks, implements

class Plugin:
    def __init__(self, config, run):
        self.seen = []

    @implements(hooks.place_batch)
    def place_batch(self, unit, batch, device):
        self.seen.append(("place", unit and unit.name, str(device)))
        return batch * FACTOR

    @implements(hooks.step_context)
    def step_context(self, unit, batch):
        return None if isinstance(batch, str) else self.around(batch)

    @contextmanager
    def around(self, batch):
        self.seen.append(("enter", torch.is_grad_enabled()))
        yield
        self.seen.append(("leave", batch[0, 0].item()))

CARD = Card(name=NAME, slot="extension", summary="A toy.", api_version="1.0",
            implementation=f"toy_{NAME}:Plugin")
"""


@pytest.fixture
def accelerator_with(toy_plugin, monkeypatch):
    made = []

    def make(**factors):
        for name, factor in factors.items():
            source = EXTENSION.replace("NAME", repr(name)).replace("FACTOR", str(factor))
            toy_plugin(name, "extension", source=source)
        monkeypatch.setenv("ACCEL__EXTENSIONS", ",".join(factors))
        made.append(Accelerator(cpu=True))
        return made[-1]

    yield make
    for accelerator in made:
        accelerator.end_training()


def seen(accelerator, name="one"):
    return accelerator.run.plugins[name].seen


def loader(count=1):
    return DataLoader(torch.ones(2 * count, FEATURES), batch_size=2)


def test_each_batch_of_a_loader_is_refined_by_all_lowest_first(accelerator_with):
    accelerator = accelerator_with(one=2, two=3)
    _, prepared = accelerator.prepare(net(), loader(2))
    assert [batch.unique().item() for batch in prepared] == [6.0, 6.0]
    assert seen(accelerator) == [("place", "unit0", "cpu")] * 2


def test_a_batch_that_may_be_of_several_units_has_none(accelerator_with):
    accelerator = accelerator_with(one=2)
    *_, prepared = accelerator.prepare(net(), net(), loader())
    next(iter(prepared))
    assert seen(accelerator) == [("place", None, "cpu")]


def test_the_context_surrounds_forward_and_backward_of_the_batch_it_is_shown(accelerator_with):
    accelerator = accelerator_with(one=2)
    model, prepared = accelerator.prepare(net(), loader())
    (batch,) = prepared
    with accelerator.accumulate(model, batch=batch):
        accelerator.backward(model(batch).mean(), model=model)
        assert seen(accelerator)[1:] == [("enter", True)]
    assert seen(accelerator)[2:] == [("leave", 2.0)]


def test_without_a_batch_there_is_no_context(accelerator_with):
    accelerator = accelerator_with(one=2)
    model = accelerator.prepare(net())
    with accelerator.accumulate(model, batch=torch.ones(1, 1)):
        pass
    before = list(seen(accelerator))
    with accelerator.accumulate(model):
        pass
    assert seen(accelerator) == before


def test_an_extension_may_have_no_context_for_a_batch(accelerator_with):
    accelerator = accelerator_with(one=2)
    model = accelerator.prepare(net())
    with accelerator.accumulate(model, batch="skip"):
        pass
    assert seen(accelerator) == []


@pytest.mark.parametrize("forward_only", [False, True])
def test_forward_backward_enters_it_for_each_micro_batch(accelerator_with, forward_only):
    accelerator = accelerator_with(one=2)
    model, prepared = accelerator.prepare(net(), loader(3))
    accelerator.forward_backward(
        model,
        prepared,
        lambda model, batch: (model(batch).mean(), None),
        microbatches=2,
        forward_only=forward_only,
    )
    contexts = [event for event in seen(accelerator) if event[0] != "place"]
    assert contexts == [("enter", not forward_only), ("leave", 2.0)] * 2


def test_a_micro_batch_that_cannot_begin_leaves_no_context_entered(accelerator_with):
    accelerator = accelerator_with(one=2)
    model, events = accelerator.prepare(net()), []
    accelerator.gradient_accumulation_steps = 2
    (unit,) = accelerator.run.units

    @contextmanager
    def silence(unit, models):
        try:
            yield
        finally:
            events.append("left")

    def refuse(unit, batch):
        raise ValueError("not this one")

    unit.steps.no_sync, unit.steps.step_context = silence, refuse
    with pytest.raises(ValueError, match="not this one"), accelerator.accumulate(model, batch=torch.ones(1)):
        pass
    with accelerator.accumulate(model):
        assert events == ["left"]


def test_who_has_no_such_extension_pays_nothing(accelerator_with):
    accelerator = accelerator_with()
    prepared = accelerator.prepare(net(), loader())[1]
    (unit,) = accelerator.run.units
    assert unit.steps.step_context is None
    assert unit.steps.place_batch is None
    assert prepared._placement is None
