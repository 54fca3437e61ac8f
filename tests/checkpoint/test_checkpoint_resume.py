"""A run is brought back exactly, whatever it is made of; what does not fit is named, nothing touched."""

from __future__ import annotations

import json
import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lookup import home_of, manifest_in
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from accel_core import Accelerator, RandomStream
from accel_core.checkpoint.defaults import BaseState
from accel_core.errors import CheckpointError
from accel_core.storage import commit


class Prepared:
    """A prepared model with its optimizer and scheduler, trained for some steps."""

    def __init__(
        self, model, optimizer=torch.optim.AdamW, scheduler=None, steps=0, groups=None, **accelerator
    ):
        torch.manual_seed(1)
        self.accelerator = Accelerator(device="cpu", **accelerator)
        self.raw = model()
        self.inner = optimizer(groups(self.raw) if groups else self.raw.parameters())
        given = [self.raw, self.inner, *([scheduler(self.inner)] if scheduler else [])]
        self.model, self.optimizer, *self.scheduler = self.accelerator.prepare(*given)
        self.losses = [self.step(number) for number in range(steps)]

    def step(self, number):
        torch.manual_seed(number)

        def evaluate():
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(8, 6)).square().mean()
            self.accelerator.backward(loss)
            return loss

        if isinstance(self.inner, torch.optim.LBFGS):
            loss = self.inner.step(evaluate)
            self.optimizer.zero_grad()
        else:
            loss = evaluate()
            self.optimizer.step()
        for scheduler in self.scheduler:
            scheduler.step(
                *([loss.detach()] if isinstance(scheduler.scheduler, lr_scheduler.ReduceLROnPlateau) else [])
            )
        return loss.item()


@pytest.fixture
def prepared():
    made = []

    def make(*args, **kwargs):
        made.append(Prepared(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.accelerator.end_training()


def network():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))


def with_momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    with_momentum,
    lambda p: torch.optim.Adam(p, amsgrad=True),
    lambda p: torch.optim.AdamW(p, foreach=True),
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.LBFGS,
    torch.optim.NAdam,
    torch.optim.RAdam,
    lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    torch.optim.Rprop,
]


@pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=lambda each: type(each(network().parameters())).__name__
)
@pytest.mark.filterwarnings("ignore:Detected call of")  # LBFGS steps without the proxy
def test_any_optimizer_goes_on_as_if_nothing_had_happened(prepared, tmp_path, optimizer):
    first = prepared(network, optimizer, steps=3)
    first.accelerator.save_state(tmp_path / "here")
    later = [first.step(number) for number in range(3, 6)]
    second = prepared(network, optimizer)
    second.accelerator.load_state(tmp_path / "here")
    assert [second.step(number) for number in range(3, 6)] == later


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_muon_on_matrices(prepared, tmp_path):
    def model():
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False))

    first = prepared(model, torch.optim.Muon, steps=2)
    first.accelerator.save_state(tmp_path / "here")
    second = prepared(model, torch.optim.Muon)
    second.accelerator.load_state(tmp_path / "here")
    assert second.step(2) == first.step(2)
    assert second.step(3) == first.step(3)


def test_sparse_gradients(prepared, tmp_path):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4, sparse=True)

        def forward(self, x):
            return self.bag((x[:, :3].abs() * 3).long().clamp(max=8))

    first, second = prepared(Bag, torch.optim.SparseAdam, steps=3), prepared(Bag, torch.optim.SparseAdam)
    first.accelerator.save_state(tmp_path / "here")
    second.accelerator.load_state(tmp_path / "here")
    assert [second.step(number) for number in range(3, 6)] == [first.step(number) for number in range(3, 6)]


class Packed(torch.optim.Optimizer):
    """Momentum in 8 bits, with a scale a block of 4 elements of the flattened parameter."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state, blocks = self.state[parameter], -(-parameter.numel() // 4)
            if not state:
                state["codes"] = torch.zeros_like(parameter, dtype=torch.int8)
                state["scales"] = torch.zeros(blocks, 1)
            pad = nn.functional.pad
            padded = pad(state["codes"].flatten().float(), (0, blocks * 4 - parameter.numel())).view(-1, 4)
            momentum = (padded * state["scales"]).flatten()[: parameter.numel()] * 0.9
            momentum += parameter.grad.flatten()
            padded = pad(momentum, (0, blocks * 4 - parameter.numel())).view(-1, 4)
            state["scales"] = padded.abs().amax(1, keepdim=True) / 127
            codes = (padded / state["scales"].clamp(min=1e-30)).round().to(torch.int8)
            state["codes"] = codes.flatten()[: parameter.numel()].view_as(parameter)
            parameter.sub_(self.param_groups[0]["lr"] * momentum.view_as(parameter))


def test_eight_bit_state_is_opaque_and_goes_on_in_its_own_optimizer(prepared, tmp_path):
    first, second = prepared(network, Packed, steps=3), prepared(network, Packed)
    first.accelerator.save_state(tmp_path / "here")
    index = json.loads((home_of(tmp_path / "here") / "rank-00000.json").read_bytes())
    for key in ("codes", "scales"):
        number, _ = index["tensors"]["unit0"][f"optimizer/0.weight/{key}"]
        outline = index["outlines"][number]
        assert (outline["kind"], outline["layout"]) == ("opaque", "Packed")
    second.accelerator.load_state(tmp_path / "here")
    assert [second.step(number) for number in range(3, 6)] == [first.step(number) for number in range(3, 6)]


class Counting(torch.optim.SGD):
    """State that is no tensor."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1
        super().step(closure)


def test_two_optimizers_of_one_model_keep_their_own_state(tmp_path):
    def make():
        accelerator, model = Accelerator(device="cpu"), network()
        halves = list(model[0].parameters()), list(model[3].parameters())
        optimizers = [Counting(half, lr=rate) for half, rate in zip(halves, (0.1, 0.2), strict=True)]
        accelerator.prepare(model, *optimizers)
        return accelerator, optimizers

    (first, saved), (second, loaded) = make(), make()
    saved[0].step()
    saved[0].step()
    saved[1].step()
    first.save_state(tmp_path / "here")
    second.load_state(tmp_path / "here")
    assert [optimizer.param_groups[0]["lr"] for optimizer in loaded] == [0.1, 0.2]
    assert [[state["calls"] for state in each.state.values()] for each in loaded] == [[2, 2], [1, 1]]
    first.end_training()
    second.end_training()


def test_a_parameter_of_two_optimizers_is_refused_before_a_save_that_no_run_could_load(tmp_path):
    accelerator, model = Accelerator(device="cpu"), network()
    optimizers = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model[3].bias], lr=0.2)
    accelerator.prepare(model, *optimizers)
    with pytest.raises(CheckpointError, match=r"unit 'unit0': 3\.bias would be stored of two optimizers"):
        accelerator.save_state(tmp_path / "here")
    accelerator.end_training()


class Falling:
    """A schedule with state of its own."""

    def __init__(self):
        self.factor = 1.0

    def __call__(self, _):
        self.factor *= 0.9
        return self.factor


SCHEDULERS = [
    lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 7], gamma=0.5),
    lambda o: lr_scheduler.StepLR(o, 2),
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: lr_scheduler.LambdaLR(o, Falling()),
    lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lr_scheduler.PolynomialLR,
    lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Falling()),
    lambda o: SWALR(o, 0.05, anneal_epochs=4),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=10.0),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)], [3]),
    lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
]


@pytest.mark.parametrize(
    "scheduler", SCHEDULERS, ids=lambda each: type(each(with_momentum(network().parameters()))).__name__
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR of torch 2.8
def test_any_scheduler_goes_on_as_if_nothing_had_happened(request, prepared, tmp_path, scheduler):
    if "SWALR" in request.node.name and not hasattr(SWALR, "_set_anneal_func"):
        pytest.skip("its state holds a function in torch 2.8")
    first = prepared(network, with_momentum, scheduler, steps=3)
    first.accelerator.save_state(tmp_path / "here")
    rates = [(first.step(number), first.inner.param_groups[0]["lr"]) for number in range(3, 9)]
    second = prepared(network, with_momentum, scheduler)
    second.accelerator.load_state(tmp_path / "here")
    assert [(second.step(number), second.inner.param_groups[0]["lr"]) for number in range(3, 9)] == rates


def test_the_loss_scale_goes_on(prepared, tmp_path):
    first = prepared(network, steps=0, mixed_precision="fp16")
    scaler = first.accelerator.run.units[0].scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0, "_growth_tracker": 17})
    first.accelerator.save_state(tmp_path / "here")
    second = prepared(network, mixed_precision="fp16")
    second.accelerator.load_state(tmp_path / "here")
    found = second.accelerator.run.units[0].scaler.state_dict()
    assert (found["scale"], found["_growth_tracker"]) == (1024.0, 17)


def test_state_of_a_plugin_that_is_not_in_this_stack_is_left_out_and_said(prepared, tmp_path, caplog):
    prepared(network, mixed_precision="fp16").accelerator.save_state(tmp_path / "here")
    with caplog.at_level(logging.WARNING):
        prepared(network).accelerator.load_state(tmp_path / "here")
    assert (
        "state of plugin fp16, which is not in this stack, or has no hook load_state, is left out"
        in caplog.text
    )


@pytest.mark.parametrize("saved", [True, False], ids=["fewer", "more"])
def test_other_devices_beside_the_runs_own_are_said_once_and_the_rest_goes_on(
    prepared, tmp_path, caplog, saved
):
    stream = RandomStream(lambda: torch.zeros(1, dtype=torch.uint8), lambda state: None)
    many = {f"chip:{index}": stream for index in range(1, 8)}

    def sees(prepared, others):
        hooks = prepared.accelerator.run.hooks
        own = hooks.random_streams
        hooks.random_streams = lambda: own() | others

    first = prepared(network, steps=1)
    sees(first, many if saved else {})
    first.accelerator.save_state(tmp_path / "state")
    expected = torch.rand(3)
    second = prepared(network)
    sees(second, {} if saved else many)
    second.accelerator.load_state(tmp_path / "state")
    assert torch.equal(torch.rand(3), expected)
    said = [record.message for record in caplog.records if "visible" in record.message]
    assert len(said) == 1
    assert "chip:1, chip:2" in said[0]


def test_a_process_alone_keeps_the_streams_of_all_devices_it_sees(monkeypatch):
    chips = SimpleNamespace(
        device_count=lambda: 3,
        get_rng_state=lambda device: torch.tensor([device.index]),
        is_available=lambda: True,
    )
    monkeypatch.setattr(torch, "xpu", chips)
    state = BaseState()
    state.run = SimpleNamespace(device=torch.device("xpu", 1), world=SimpleNamespace(size=1))
    streams = {name: it.get().item() for name, it in state.random_streams().items() if name.startswith("xpu")}
    assert streams == {"xpu": 1, "xpu:0": 0, "xpu:2": 2}


def test_every_random_stream_goes_on(prepared, tmp_path):
    accelerator = prepared(network).accelerator
    accelerator.save_state(tmp_path / "here")

    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(0, 1)  # noqa: NPY002 - the global stream

    first = draw()
    draw()
    accelerator.load_state(tmp_path / "here")
    assert draw() == first


class Average:
    """The user's own state: large tensors, nested."""

    def __init__(self):
        self.state = {
            "decay": 0.9,
            "history": [(1, torch.rand(2))],
            "shadow": {"w": torch.rand(300, 300), "n": np.arange(3)},
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_registered_objects_come_back(prepared, tmp_path):
    first, second, average, other = prepared(network), prepared(network), Average(), Average()
    first.accelerator.register_for_checkpointing(average)
    first.accelerator.save_state(tmp_path / "here")
    second.accelerator.register_for_checkpointing(other)
    second.accelerator.load_state(tmp_path / "here")
    assert torch.equal(other.state["shadow"]["w"], average.state["shadow"]["w"])
    assert np.array_equal(other.state["shadow"]["n"], average.state["shadow"]["n"])
    assert other.state["history"][0][0] == 1
    assert type(other.state["history"][0]) is tuple


def test_every_scheduler_of_torch_is_in_the_list():
    classes = {type(each(with_momentum(network().parameters()))).__name__ for each in SCHEDULERS}
    assert {name for name in lr_scheduler.__all__ if name != "LRScheduler"} <= classes


def test_an_average_of_the_weights_goes_on(prepared, tmp_path):
    first, second = prepared(network, steps=1), prepared(network)
    averages = [AveragedModel(each.raw, use_buffers=True) for each in (first, second)]
    for each, average in zip((first, second), averages, strict=True):
        each.accelerator.register_for_checkpointing(average)
    for number in range(3):
        first.step(number)
        averages[0].update_parameters(first.raw)
    first.accelerator.save_state(tmp_path / "here")
    second.accelerator.load_state(tmp_path / "here")
    for each, average in zip((first, second), averages, strict=True):
        each.step(3)
        average.update_parameters(each.raw)
    for name, value in averages[0].state_dict().items():
        assert torch.equal(value, averages[1].state_dict()[name]), name


def test_a_large_registered_tensor_is_in_the_data_file(prepared, tmp_path):
    accelerator = prepared(network).accelerator
    accelerator.register_for_checkpointing(Average())
    accelerator.save_state(tmp_path / "here")
    assert (home_of(tmp_path / "here") / "state.json").stat().st_size < 20_000
    assert (home_of(tmp_path / "here") / "rank-00000.safetensors").stat().st_size > 300 * 300 * 4


def test_an_object_that_is_not_plain_state_is_refused_and_nothing_is_written(prepared, tmp_path):
    accelerator, average = prepared(network).accelerator, Average()
    average.state["fn"] = print
    accelerator.register_for_checkpointing(average)
    with pytest.raises(CheckpointError, match=r"registered\[0\] \(Average\)\.fn cannot be stored") as refused:
        accelerator.save_state(tmp_path / "here")
    assert "let state_dict() return" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


class Extra(nn.Linear):
    """A module with state that is no tensor."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_extra_state_of_modules_comes_back(prepared, tmp_path):
    first, second = prepared(lambda: Extra(6, 4)), prepared(lambda: Extra(6, 4))
    first.raw.calls = 5
    first.accelerator.save_state(tmp_path / "here")
    second.accelerator.load_state(tmp_path / "here")
    assert second.raw.calls == 5


# -- names ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tie, first="embedding"):
        super().__init__()
        names = ["embedding", "head"] if first == "embedding" else ["head", "embedding"]
        for name in names:
            setattr(self, name, nn.Linear(6, 6, bias=False))
        if tie:
            setattr(self, names[1], getattr(self, names[0]))

    def forward(self, x):
        return self.head(self.embedding(x))


def test_tied_weights_are_stored_once_and_load_under_whichever_name_comes_first(prepared, tmp_path):
    first = prepared(lambda: Tied(True), steps=2)
    first.accelerator.save_state(tmp_path / "here")
    index = json.loads((home_of(tmp_path / "here") / "rank-00000.json").read_bytes())["tensors"]["unit0"]
    assert [key for key in index if key.startswith("model/")] == ["model/embedding.weight"]
    second = prepared(lambda: Tied(True, first="head"))
    second.accelerator.load_state(tmp_path / "here")
    assert torch.equal(second.raw.embedding.weight, first.raw.embedding.weight)
    assert second.step(2) == first.step(2)
    assert second.step(3) == first.step(3)


def test_tied_weights_do_not_load_into_untied_ones(prepared, tmp_path):
    prepared(lambda: Tied(True)).accelerator.save_state(tmp_path / "here")
    with pytest.raises(
        CheckpointError, match=r"head\.weight was tied to embedding\.weight, and is not tied to it here"
    ):
        prepared(lambda: Tied(False)).accelerator.load_state(tmp_path / "here")


@pytest.mark.parametrize("strict", [True, False])
def test_two_weights_do_not_load_into_tied_ones(prepared, tmp_path, strict):
    prepared(lambda: Tied(False)).accelerator.save_state(tmp_path / "here")
    tied = prepared(lambda: Tied(True))
    with pytest.raises(
        CheckpointError,
        match=r"model/embedding\.weight and model/head\.weight are one here, by a tie, and were two",
    ):
        tied.accelerator.load_state(tmp_path / "here", strict=strict)


def test_frozen_parameters_come_back_without_optimizer_state(prepared, tmp_path):
    def frozen():
        model = network()
        model[0].requires_grad_(requires_grad=False)
        return model

    first, second = prepared(frozen, steps=2), prepared(frozen)
    nn.init.ones_(first.raw[0].weight)
    first.accelerator.save_state(tmp_path / "here")
    second.accelerator.load_state(tmp_path / "here")
    assert torch.equal(second.raw[0].weight, torch.ones(5, 6))
    assert second.step(2) == first.step(2)


def test_names_may_hold_anything(prepared, tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = nn.ParameterDict(
                {
                    "a/b@0": nn.Parameter(torch.rand(6)),
                    "$x": nn.Parameter(torch.rand(6)),
                    "é": nn.Parameter(torch.rand(())),
                }
            )

        def forward(self, x):
            return x * self.odd["a/b@0"] * self.odd["$x"] * self.odd["é"]

    first, second = prepared(Odd, steps=2), prepared(Odd)
    first.accelerator.save_state(tmp_path / "here")
    second.accelerator.load_state(tmp_path / "here")
    assert second.step(2) == first.step(2)


def network_in_parts(wrap):
    part = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
    part.register_buffer("kept", torch.ones(2))
    return nn.Sequential(nn.Linear(6, 6), wrap(part), nn.Linear(5, 4))


def compiled(module):
    return torch.compile(module, backend="eager")


WRAPPED = {
    "plain": lambda: network_in_parts(lambda part: part),
    "part compiled": lambda: network_in_parts(compiled),
    "part checkpointed": lambda: network_in_parts(checkpoint_wrapper),
    "compiled": lambda: compiled(network_in_parts(checkpoint_wrapper)),
}


@pytest.mark.parametrize("saved", WRAPPED)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile, which looks at everything
def test_wrapped_differently_it_just_loads(prepared, tmp_path, saved):
    first = prepared(WRAPPED[saved], steps=2)
    first.accelerator.save_state(tmp_path / "here")
    expected = [first.step(number) for number in range(2, 4)]
    for here in WRAPPED.values():
        second = prepared(here)
        second.accelerator.load_state(tmp_path / "here")
        assert [second.step(number) for number in range(2, 4)] == expected


def test_two_units_in_one_checkpoint(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        accelerator = Accelerator(device="cpu")
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
        accelerator.prepare(*models, *optimizers)
        return accelerator, models

    (first, saved), (second, loaded) = make(0), make(1)
    first.save_state(tmp_path / "here")
    second.load_state(tmp_path / "here")
    for one, other in zip(saved, loaded, strict=True):
        assert torch.equal(one.weight, other.weight)
    first.end_training()
    second.end_training()


# -- groups --------------------------------------------------------------------------------------


def two_groups(model):
    return [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[3].parameters(), "lr": 0.2, "weight_decay": 0.5},
    ]


def reversed_groups(model):
    return [{"params": model[3].parameters()}, {"params": model[0].parameters()}]


def one_group(model):
    return [{"params": [*model[0].parameters(), *model[3].parameters()]}]


def test_groups_are_restored_by_name_not_by_position(prepared, tmp_path):
    first = prepared(network, with_momentum, steps=3, groups=two_groups)
    first.accelerator.save_state(tmp_path / "here")
    second = prepared(network, with_momentum, groups=reversed_groups)
    second.accelerator.load_state(tmp_path / "here")
    found = [(group["lr"], group["weight_decay"]) for group in second.inner.param_groups]
    assert found == [(0.2, 0.5), (0.1, 0)]
    assert [second.step(number) for number in range(3, 6)] == [first.step(number) for number in range(3, 6)]


def cyclic(optimizer):
    peaks = [2 * group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.CyclicLR(optimizer, 0.01, peaks, 3)


@pytest.mark.parametrize("groups", [one_group, reversed_groups])
def test_a_scheduler_of_groups_in_another_order_is_refused(prepared, tmp_path, groups):
    prepared(network, with_momentum, cyclic, groups=two_groups).accelerator.save_state(tmp_path / "here")
    second = prepared(network, with_momentum, cyclic, groups=groups)
    with pytest.raises(CheckpointError, match=r"CyclicLR\): its optimizer has other groups, or has them in"):
        second.accelerator.load_state(tmp_path / "here")


def test_a_scheduler_that_was_made_from_the_prepared_optimizer_is_refused_too(prepared, tmp_path):
    prepared(network, with_momentum, cyclic, groups=two_groups).accelerator.save_state(tmp_path / "here")
    second = prepared(network, with_momentum, groups=reversed_groups)
    second.accelerator.prepare(cyclic(second.optimizer))
    with pytest.raises(CheckpointError, match=r"CyclicLR\): its optimizer has other groups, or has them in"):
        second.accelerator.load_state(tmp_path / "here")


def test_a_hyperparameter_that_the_checkpoint_lacks_keeps_its_value_and_is_named(prepared, tmp_path, caplog):
    first, second = prepared(network, steps=1), prepared(network)
    del first.inner.param_groups[0]["maximize"]
    first.accelerator.save_state(tmp_path / "here")
    with caplog.at_level(logging.WARNING):
        second.accelerator.load_state(tmp_path / "here")
    assert "group 0 of AdamW: maximize is not in the checkpoint, it stays False" in caplog.text


def test_groups_that_disagree_are_refused_naming_both_values(prepared, tmp_path):
    prepared(network, with_momentum, groups=two_groups).accelerator.save_state(tmp_path / "here")
    second = prepared(network, with_momentum, groups=one_group)
    with pytest.raises(
        CheckpointError, match=r"lr: 0\.weight had 0\.1, 3\.weight had 0\.2, and both are in one group now"
    ):
        second.accelerator.load_state(tmp_path / "here")
    assert second.inner.param_groups[0]["lr"] == 0.1


def test_a_groups_values_of_several_elements_disagree_with_anothers_number(prepared, tmp_path):
    first = prepared(network, with_momentum, groups=two_groups)
    for group, scale in zip(first.inner.param_groups, (torch.ones(2), 1.0), strict=True):
        group["scale"] = scale
    first.accelerator.save_state(tmp_path / "here")
    with pytest.raises(CheckpointError, match="scale: 0.weight had .* and both are in one group now"):
        prepared(network, with_momentum, groups=one_group).accelerator.load_state(tmp_path / "here")


def test_how_a_step_is_computed_is_not_restored(prepared, tmp_path):
    prepared(network, lambda p: torch.optim.AdamW(p, fused=True), steps=1).accelerator.save_state(
        tmp_path / "here"
    )
    second = prepared(network, lambda p: torch.optim.AdamW(p, foreach=True))
    second.accelerator.load_state(tmp_path / "here")
    assert (second.inner.param_groups[0]["fused"], second.inner.param_groups[0]["foreach"]) == (None, True)
    second.step(1)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.LBFGS])
@pytest.mark.filterwarnings("ignore:Detected call of")  # LBFGS steps without the proxy
def test_loading_a_checkpoint_from_before_the_first_step_clears_optimizer_state(
    prepared, tmp_path, optimizer
):
    first = prepared(network, optimizer)
    first.accelerator.save_state(tmp_path / "here")
    losses = [first.step(number) for number in range(3)]
    first.accelerator.load_state(tmp_path / "here")
    assert [first.step(number) for number in range(3)] == losses


# -- what does not fit ---------------------------------------------------------------------------


def refusal(prepared_run, folder):
    before = {name: value.clone() for name, value in prepared_run.raw.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(CheckpointError) as refused:
        prepared_run.accelerator.load_state(folder)
    after = prepared_run.raw.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "weights were touched"
    assert torch.equal(torch.get_rng_state(), state), "random streams were touched"
    return str(refused.value)


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        (
            {},
            {"model": lambda: nn.Linear(6, 4)},
            ["missing in the checkpoint: unit0: model/weight", "unexpected"],
        ),
        (
            {},
            {"model": lambda: nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 4))},
            ["unit0: model/0.weight has shape [5, 6] in the checkpoint, [7, 6] here"],
        ),
        (
            {},
            {"optimizer": with_momentum},
            ["unit0: 0.weight was stepped by AdamW, here by SGD, another class"],
        ),
        (
            {},
            {"scheduler": lambda o: lr_scheduler.StepLR(o, 2)},
            ["missing in the checkpoint: unit0: scheduler 0"],
        ),
        (
            {"scheduler": lambda o: lr_scheduler.StepLR(o, 2)},
            {},
            ["unexpected, the run has no such state: unit0: scheduler 0"],
        ),
        (
            {"scheduler": lambda o: lr_scheduler.StepLR(o, 2)},
            {"scheduler": lr_scheduler.ConstantLR},
            ["unit0: scheduler 0 is a StepLR in the checkpoint, a ConstantLR here"],
        ),
        (
            {"groups": lambda m: [*m.parameters()]},
            {"groups": lambda m: [*m.parameters()][:-1]},
            ["unexpected, the run has no such state: unit0: optimizer state of 3.bias"],
        ),
        (
            {"groups": lambda m: [*m.parameters()][:-1]},
            {"groups": lambda m: [*m.parameters()]},
            ["missing in the checkpoint: unit0: AdamW of 3.bias"],
        ),
        (
            {},
            {"model": lambda: network().to(torch.bfloat16)},
            ["model/0.weight is float32 in the checkpoint; bfloat16 here may lose digits"],
        ),
    ],
    ids=[
        "names",
        "shapes",
        "optimizer",
        "scheduler-missing",
        "scheduler-unexpected",
        "scheduler-class",
        "group",
        "group-missing",
        "dtype",
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_touched(prepared, tmp_path, saved, here, words):
    prepared(**{"model": network, "steps": 1, **saved}).accelerator.save_state(tmp_path / "here")
    message = refusal(prepared(**{"model": network, **here}), tmp_path / "here")
    for word in words:
        assert word in message
    assert "nothing was loaded" in message
    assert "prepare what was prepared" in message.splitlines()[-1]


def test_a_program_without_the_optimizer_is_told(tmp_path, prepared):
    prepared(network, steps=1).accelerator.save_state(tmp_path / "here")
    accelerator = Accelerator(device="cpu")
    accelerator.prepare(network())
    with pytest.raises(CheckpointError, match=r"no such state: unit0: optimizer state of 0\.weight"):
        accelerator.load_state(tmp_path / "here")
    accelerator.end_training()


def test_not_strict_loads_what_fits_and_logs_the_rest(prepared, tmp_path, caplog):
    first = prepared(network, steps=1, scheduler=lambda o: lr_scheduler.StepLR(o, 2))
    first.accelerator.save_state(tmp_path / "here")
    second = prepared(network)
    second.accelerator.run.checkpoints.load(tmp_path / "here", strict=False)
    assert torch.equal(second.raw[0].weight, first.raw[0].weight)
    assert "unexpected, the run has no such state: unit0: scheduler 0" in caplog.text


def test_inside_a_window_saving_says_when(prepared, tmp_path):
    run = prepared(network, gradient_accumulation_steps=4)
    with run.accelerator.accumulate(run.model), pytest.raises(CheckpointError) as refused:
        run.accelerator.save_state(tmp_path / "here")
    assert "unit 'unit0' has accumulated 1 of 4 micro-batches" in str(refused.value)
    assert "if accelerator.sync_gradients:" in str(refused.value).splitlines()[-1]


def test_gradients_that_wait_for_a_step_are_not_lost_without_a_word(prepared, tmp_path):
    run = prepared(network)
    run.accelerator.backward(run.model(torch.randn(8, 6)).sum())
    with pytest.raises(CheckpointError, match=r"that no optimizer has applied.*\nsave after optimizer"):
        run.accelerator.save_state(tmp_path / "here")
    run.optimizer.step()
    run.accelerator.save_state(tmp_path / "here")


def test_a_strategy_that_forgets_a_weight_or_invents_a_name_is_refused(prepared, tmp_path):
    accelerator = prepared(network).accelerator
    hooks = accelerator.run.units[0].hooks
    offered = dict(hooks.model_state(accelerator.run.units[0]))
    offered["module.3.bias"] = offered.pop("3.bias")
    hooks.model_state = lambda unit: offered
    with pytest.raises(CheckpointError, match=r"strategy 'single' offers has 3\.bias, module\.3\.bias\n"):
        accelerator.save_state(tmp_path / "here")
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_outside_of_every_model_is_refused(tmp_path):
    accelerator, model, stray = Accelerator(device="cpu"), nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)
    optimizer.add_param_group({"params": [stray]})
    with pytest.raises(CheckpointError, match="parameter 0 of group 1 of SGD belongs to no prepared model"):
        accelerator.save_state(tmp_path / "here")
    accelerator.end_training()


# -- where it is written -------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["file", "folder"])
def test_something_foreign_is_left_alone(prepared, tmp_path, content):
    target = tmp_path / "mine"
    if content == "file":
        target.write_text("precious")
    else:
        target.mkdir()
        (target / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint; it was left as it is"):
        prepared(network).accelerator.save_state(target)
    assert (target if content == "file" else target / "thesis.tex").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_is_filled(prepared, tmp_path):
    (tmp_path / "here").mkdir()
    accelerator = prepared(network).accelerator
    accelerator.save_state(tmp_path / "here")
    assert manifest_in(tmp_path / "here").exists()
    accelerator.load_state(tmp_path / "here")


def test_a_link_keeps_pointing_where_it_points(prepared, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    accelerator = prepared(network).accelerator
    for _ in range(2):
        accelerator.save_state(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert manifest_in(tmp_path / "disk").is_file()


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(prepared, tmp_path, monkeypatch):
    run = prepared(network)
    run.accelerator.save_state(tmp_path / "here")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "manifest_of", full)
    with pytest.raises(CheckpointError, match="rank 0: OSError: .* No space left"):
        run.accelerator.save_state(tmp_path / "here")
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    run.accelerator.load_state(tmp_path / "here")


def test_a_resumed_run_is_the_run_that_was_saved(prepared, tmp_path):
    first, second = prepared(network), prepared(network)
    first.accelerator.save_state(tmp_path / "here")
    assert first.accelerator.run.run_id != second.accelerator.run.run_id
    second.accelerator.load_state(tmp_path / "here")
    assert first.accelerator.run.run_id == second.accelerator.run.run_id


def test_weights_that_the_program_keeps_itself_are_neither_saved_nor_loaded(tmp_path):
    one = Prepared(lambda: nn.Linear(6, 2), steps=2)
    one.accelerator.run.unsaved_models = [one.model]
    one.accelerator.save_state(tmp_path / "here")
    index = json.loads((home_of(tmp_path / "here") / "rank-00000.json").read_bytes())
    assert all(key.startswith("optimizer/") for key in index["tensors"]["unit0"])

    with torch.no_grad():
        one.raw.weight.fill_(3.0)
    one.step(3)
    kept = one.raw.weight.clone()
    one.accelerator.load_state(tmp_path / "here")
    assert torch.equal(one.raw.weight, kept)
    assert int(one.inner.state[one.raw.weight]["step"]) == 2

    one.accelerator.run.unsaved_models = []
    with pytest.raises(CheckpointError, match="missing in the checkpoint: unit0: model/weight"):
        one.accelerator.load_state(tmp_path / "here")
