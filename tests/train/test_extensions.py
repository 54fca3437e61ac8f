"""Doors for precisions, quantisation and extensions: gradients, optimizers, loaded state, capabilities."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from training_problems import FEATURES, net

from accel_core import Accelerator, AccelError, ConfigError

TOY = """
import torch
from torch.optim import Optimizer
from accel_core import Card, Entry, hooks, implements, full_leaf

class Slow(Optimizer):
    '''Lookahead without its slow weights: counts, and steps what it wraps.'''

    def __init__(self, inner):
        self.inner, self.defaults, self.steps = inner, inner.defaults, 0

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def step(self, closure=None):
        self.steps += 1
        return self.inner.step(closure)

class Plugin:
    def __init__(self, config, run):
        self.run, self.seen, self.loaded = run, [], 0

METHODS

CARD = Card(name="NAME", slot="SLOT", summary="A toy.", api_version="1.0", offers=OFFERS,
            implementation="toy_NAME:Plugin")
"""
OPTIMIZER = """
    @implements(hooks.wrap_optimizer)
    def wrap_optimizer(self, unit, optimizer):
        return Slow(optimizer)
"""
LOADED = """
    @implements(hooks.load_state)
    def load_state(self, unit):
        self.loaded += 1
"""
KEEPS = """
    @implements(hooks.save_state)
    def save_state(self, unit):
        self.kept = getattr(self, "kept", torch.zeros(3))
        return {"kept": Entry(value=full_leaf(self.kept))}
"""
MARKED = """
    @implements(hooks.save_state)
    def save_state(self, unit):
        of_rank = Entry(value=[torch.full((20_000,), 5.0)], scope="per_rank")
        plain = Entry(value={"$stored": torch.full((20_000,), 2.0), "$dict": {"$stored": "a"}})
        return {"$stored": plain, "$tensor": Entry(value=full_leaf(torch.full((3,), 4.0))), "$x": of_rank}

    @implements(hooks.load_state)
    def load_state(self, unit, entries):
        self.kept = {name: entry.value for name, entry in entries.items()}
"""
NO_HALF = """
    @implements(hooks.capabilities)
    def capabilities(self, device):
        return self.below.capabilities(device) - {"fp16"}
"""
SCALER = """
    @implements(hooks.select_device)
    def select_device(self, world):
        return torch.device("cpu")

    @implements(hooks.grad_scaler)
    def grad_scaler(self, unit):
        return torch.amp.GradScaler("cpu", init_scale=2.0)
"""
ELSEWHERE = """
    @implements(hooks.select_device)
    def select_device(self, world):
        return torch.device("meta")
"""
ENGINE = """
    @implements(hooks.prepare_unit)
    def prepare_unit(self, unit, loaders):
        unit.wrapped += unit.models
"""


@pytest.fixture
def accelerator_with(toy_plugin, monkeypatch):
    made = []

    def make(extension="    pass", strategy=None, offers=(), **options):
        toys = [("watcher", "extension", extension, ())]
        if strategy is not None:
            toys.append(("toy", "strategy", strategy, offers))
            options["strategy"] = "toy"
        for name, slot, methods, words in toys:
            source = TOY.replace("METHODS", methods).replace("NAME", name).replace("SLOT", slot)
            toy_plugin(name, slot, source=source.replace("OFFERS", repr(set(words))))
        monkeypatch.setenv("ACCEL__EXTENSIONS", "watcher")
        made.append(Accelerator(cpu=True, **options))
        return made[-1]

    yield make
    for accelerator in made:
        accelerator.end_training()


def train(accelerator, model):
    x = torch.linspace(-1, 1, 2 * FEATURES).view(2, FEATURES)
    accelerator.backward(model(x).pow(2).sum())
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# -- wrap_optimizer --------------------------------------------------------------------------------


def test_an_extension_wraps_the_optimizer_and_its_state_is_saved(accelerator_with, tmp_path):
    accelerator = accelerator_with(OPTIMIZER)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, prepared = accelerator.prepare(model, optimizer)
    train(accelerator, model)
    prepared.step()
    (wrapped,) = accelerator.run.units[0].optimizers
    assert wrapped.steps == 1
    assert wrapped.inner is optimizer
    buffers = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    accelerator.save_state(tmp_path / "saved")
    prepared.step()
    accelerator.load_state(tmp_path / "saved")
    loaded = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(map(torch.equal, buffers, loaded))


def test_an_engines_optimizer_cannot_be_wrapped(accelerator_with):
    accelerator = accelerator_with(OPTIMIZER, strategy=ENGINE)
    model = net()
    with pytest.raises(AccelError, match="watcher would wrap the SGD, which strategy 'toy' steps itself"):
        accelerator.prepare(model, SGD(model.parameters(), lr=0.1))


# -- save_state, load_state ------------------------------------------------------------------------


def test_every_plugin_hears_that_state_was_loaded(accelerator_with, tmp_path):
    accelerator = accelerator_with(LOADED, strategy=LOADED)
    accelerator.prepare(net())
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")
    assert [accelerator.run.plugins[name].loaded for name in ("toy", "watcher")] == [1, 1]


def test_a_plugin_that_joins_later_begins_anew(accelerator_with, tmp_path, caplog):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(net())
    accelerator.save_state(tmp_path / "without")
    accelerator.end_training()

    accelerator = accelerator_with(KEEPS)
    accelerator.prepare(net())
    kept = accelerator.run.plugins["watcher"]
    accelerator.load_state(tmp_path / "without")
    assert "it has no state of plugin watcher, which begins anew" in caplog.text
    kept.kept += 1
    accelerator.save_state(tmp_path / "with")
    kept.kept += 1
    accelerator.load_state(tmp_path / "with")
    assert torch.equal(kept.kept, torch.ones(3))
    assert "left out" not in caplog.text


FORGETS = """
    @implements(hooks.save_state)
    def save_state(self, unit):
        return {"count": Entry(value=3)}
"""


def test_values_that_a_plugin_cannot_take_back_are_named(accelerator_with, tmp_path, caplog):
    accelerator = accelerator_with(FORGETS)
    accelerator.prepare(net())
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")

    assert "plugin watcher, which is not in this stack, or has no hook load_state, is left out" in caplog.text


RUN_STATE = """
    def state_dict(self):
        return None
"""


def test_a_plugin_without_state_of_the_run_may_say_none(accelerator_with, tmp_path):
    accelerator = accelerator_with(RUN_STATE)
    accelerator.prepare(net())
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")


# -- capabilities ----------------------------------------------------------------------------------


def test_entries_named_as_the_checkpoints_own_marks_come_back(accelerator_with, tmp_path):
    accelerator = accelerator_with(MARKED)
    accelerator.prepare(net())
    accelerator.save_state(tmp_path / "ck")
    accelerator.load_state(tmp_path / "ck")
    kept = accelerator.run.plugins["watcher"].kept
    assert kept.keys() == {"$stored", "$tensor", "$x"}
    assert torch.equal(kept["$stored"].pop("$stored"), torch.full((20_000,), 2.0))
    assert kept["$stored"] == {"$dict": {"$stored": "a"}}
    assert torch.equal(kept["$x"][0], torch.full((20_000,), 5.0))


def test_a_strategy_narrows_what_the_device_can_do(accelerator_with):
    message = r"precision fp16 \(.*\) needs fp16, which strategy 'toy' cannot do\n.*another strategy"
    with pytest.raises(ConfigError, match=message):
        accelerator_with(strategy=NO_HALF, mixed_precision="fp16")
    accelerator = Accelerator(cpu=True, strategy="toy", mixed_precision="bf16")
    assert "bf16" in accelerator.run.hooks.capabilities(accelerator.device)
    accelerator.end_training()


def test_so_does_a_strategy_that_only_prepare_names(accelerator_with):
    accelerator_with(strategy=NO_HALF)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", strategy="single")
    with pytest.raises(ConfigError, match="which strategy 'toy' cannot do"):
        accelerator.prepare(net(), strategy="toy")
    accelerator.end_training()


@pytest.fixture
def without_float64(toy_plugin, monkeypatch):
    """A run whose device is none that holds the model, and lacks float64."""
    source = TOY.replace("METHODS", ELSEWHERE).replace("NAME", "chip").replace("SLOT", "device")
    toy_plugin("chip", "device", source=source.replace("OFFERS", "set()"))
    source = TOY.replace("METHODS", "    pass").replace("NAME", "toy").replace("SLOT", "strategy")
    toy_plugin("toy", "strategy", source=source.replace("OFFERS", "set()"))
    monkeypatch.setenv("ACCEL__DEVICE", "chip")
    accelerator = Accelerator()
    yield accelerator
    accelerator.end_training()


def test_float64_is_refused_where_the_device_lacks_it_and_trains_elsewhere(without_float64):
    model, plain = net().double(), net().double()
    told = (
        r"prepare: 0.weight, .* of the Sequential is float64, which meta lacks\n.*model.float\(\), or leave"
    )
    with pytest.raises(ConfigError, match=told):
        without_float64.prepare(model)
    x = torch.linspace(-1, 1, 2 * FEATURES, dtype=torch.float64).view(2, FEATURES)
    prepared, optimizer = without_float64.prepare(
        model, SGD(model.parameters(), lr=0.1), device_placement=[False, False]
    )
    expected = SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        without_float64.backward(prepared(x).pow(2).sum())
        plain(x).pow(2).sum().backward()
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_of_many_weights_of_float64_five_are_named(without_float64):
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(7))).double()
    with pytest.raises(ConfigError, match="prepare: 0.weight, 1.weight, 2.weight, 3.weight, 4.weight of the"):
        without_float64.prepare(model)


# -- grad_scaler -----------------------------------------------------------------------------------


def test_a_device_brings_the_loss_scaler_that_sees_its_overflow(toy_plugin, monkeypatch):
    source = TOY.replace("METHODS", SCALER).replace("NAME", "chip").replace("SLOT", "device")
    toy_plugin("chip", "device", source=source.replace("OFFERS", repr({"fp16"})))
    monkeypatch.setenv("ACCEL__DEVICE", "chip")
    accelerator = Accelerator(mixed_precision="fp16")
    accelerator.prepare(net())

    assert accelerator.run.units[0].scaler.get_scale() == 2.0
    accelerator.end_training()


# -- collectives -----------------------------------------------------------------------------------


def test_a_rank_alone_has_no_process_group():
    accelerator = Accelerator(cpu=True)
    assert accelerator.run.collectives("world").group is None
    accelerator.end_training()
