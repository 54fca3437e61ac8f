"""Optimizers go on exactly; one with state beside that of its parameters is refused when it is saved."""

from __future__ import annotations

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from accel_core import Accelerator, CheckpointError, open_checkpoint, storage_at
from accel_core.checkpoint import defaults
from accel_core.checkpoint.load import compare
from accel_core.storage.tensors import Checkpoint


class Averaging(torch.optim.SGD):
    """SGD over a decaying average, with the count of steps where `place` says."""

    place = "own"

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.count = 0

    def counted(self):
        return self.count

    def count_one(self):
        self.count += 1

    @torch.no_grad()
    def step(self, closure=None):
        self.count_one()
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault(self.key, torch.zeros_like(parameter))
                average.mul_(0.9).add_(parameter.grad)
                parameter.sub_(average, alpha=group["lr"] / self.counted())

    key = "average"


class OfNoParameter(Averaging):
    def counted(self):
        return self.state["global"]["count"]

    def count_one(self):
        self.state["global"]["count"] = self.state["global"].get("count", 0) + 1


class InItsStateDict(Averaging):
    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state):
        state = dict(state)
        self.count = state.pop("count")
        super().load_state_dict(state)


class ByHooks(Averaging):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.register_state_dict_post_hook(lambda self, state: {**state, "count": self.count})
        self.register_load_state_dict_pre_hook(lambda self, state: setattr(self, "count", state["count"]))


class InItsGroups(Averaging):
    """As apex's fused optimizers: the key is there from the first step on."""

    def counted(self):
        return self.param_groups[0]["step"]

    def count_one(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


class Wrapping(torch.optim.Optimizer):
    """Around another optimizer, whose groups and state it shares; never calls torch's `__init__`."""

    def __init__(self, parameters):
        self.base = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.defaults = self.base.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.param_groups, self.state = self.base.param_groups, self.base.state
        self.param_groups[0]["count"] = 0

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.param_groups[0]["count"] += 1
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            if self.param_groups[0]["count"] % 2 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self):
        return self.base.state_dict()


def trained(kind, steps, load=None, save=None):
    """The weight after `steps` steps, which begin at a checkpoint, or end at one."""
    torch.manual_seed(0)
    accelerator = Accelerator(device="cpu")
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, kind(model.parameters()))
    if load:
        accelerator.load_state(load)
    for step in steps:
        accelerator.backward(model(torch.full((1, 3), float(step))).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    if save:
        accelerator.save_state(save)
    accelerator.end_training()
    return model.weight.detach().clone()


class Grouping(InItsGroups):
    """As bitsandbytes' optimizers, which hide values from FSDP so."""

    def state_dict(self):
        told = super().state_dict()
        return {**told, "state": {number: {"wrapped": each} for number, each in told["state"].items()}}


class Copying(InItsGroups):
    """Its `state_dict` is a copy of what it keeps, arrays and lists of tensors too; some are not set yet."""

    def count_one(self):
        super().count_one()
        unset = {"best": float("-nan"), "lowest": np.array([np.nan]), "norm": torch.tensor(float("nan"))}
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= {"seen": np.arange(3.0), "norms": [torch.ones(2)], **unset}

    def state_dict(self):
        return deepcopy(super().state_dict())


@pytest.mark.parametrize("kind", [InItsGroups, Wrapping, Grouping, Copying])
def test_it_goes_on_as_if_nothing_had_happened(tmp_path, kind):
    whole = trained(kind, range(1, 6))
    trained(kind, range(1, 4), save=tmp_path / "ck")
    assert torch.equal(trained(kind, range(4, 6), load=tmp_path / "ck"), whole)


@pytest.mark.parametrize("kind", [OfNoParameter, InItsStateDict, ByHooks])
def test_state_beside_that_of_parameters_is_refused_by_name(tmp_path, kind):
    with pytest.raises(
        CheckpointError, match=rf"{kind.__name__} keeps .*: it would not be saved\nkeep it with"
    ):
        trained(kind, range(1, 3), save=tmp_path / "ck")


def test_another_class_is_named_with_the_class_that_saved_it(tmp_path):
    trained(torch.optim.Adam, range(1, 3), save=tmp_path / "ck")
    with pytest.raises(CheckpointError, match="was stepped by Adam, here by AdamW, another class"):
        trained(torch.optim.AdamW, range(1, 3), load=tmp_path / "ck")


def test_registered_state_that_holds_itself_is_refused_by_name(tmp_path):
    class Loop:
        def state_dict(self):
            found = {}
            found["again"] = found
            return found

        def load_state_dict(self, state): ...

    accelerator = Accelerator(device="cpu")
    accelerator.register_for_checkpointing(Loop())
    with pytest.raises(CheckpointError, match=r"registered\[0\] .* cannot be stored: it contains itself"):
        accelerator.save_state(tmp_path / "ck")
    accelerator.end_training()


def test_a_plan_that_is_not_carried_out_changes_nothing(tmp_path):
    made = []
    for lr in (0.1, 0.2):
        accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        prepared, stepping = accelerator.prepare(model, optimizer)
        accelerator.backward(prepared(torch.ones(1, 2)).sum())
        stepping.step()
        stepping.zero_grad()
        made.append((accelerator, optimizer))
    (first, _), (second, optimizer) = made
    before = deepcopy(optimizer.state_dict())
    with open_checkpoint(storage_at(first.save_state(tmp_path / "here"))) as opened:
        checkpoint = Checkpoint.with_tensors(opened)
    restoration = compare(second.run, checkpoint, strict=True)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    restoration.apply()
    assert optimizer.param_groups[0]["lr"] == 0.1
    first.end_training()
    second.end_training()


@pytest.fixture
def stepped(tmp_path):
    """A run with one step of Adam, saved, with other weights afterwards: (run, model, optimizer, folder)."""
    accelerator, model = Accelerator(device="cpu"), nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    prepared, stepping = accelerator.prepare(model, optimizer)
    accelerator.backward(prepared(torch.ones(1, 2)).sum())
    stepping.step()
    stepping.zero_grad()
    accelerator.save_state(tmp_path / "ck")
    with torch.no_grad():
        model.weight.fill_(7)
    yield accelerator, model, optimizer, tmp_path / "ck"
    accelerator.end_training()


def test_a_load_describes_each_tensor_of_an_optimizer_once(stepped, monkeypatch):
    accelerator, _, _, folder = stepped
    described, leaf_of = [], defaults.leaf_of

    def counted(tensor, **options):
        described.append(tensor)
        return leaf_of(tensor, **options)

    monkeypatch.setattr(defaults, "leaf_of", counted)
    accelerator.load_state(folder)
    assert len(described) == 2 + 2 * 3  # weight and bias; step and two moments of each


@pytest.mark.filterwarnings("ignore:.*nested")  # torch says it once a process
def test_a_tensor_without_a_shape_is_refused_before_anything_is_loaded(stepped):
    accelerator, model, optimizer, folder = stepped
    optimizer.state[model.weight]["odd"] = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(CheckpointError, match="sizes"):
        accelerator.load_state(folder)
    assert model.weight.eq(7).all()


@pytest.mark.parametrize("key", [0, "average/fast"])
def test_a_key_that_cannot_be_stored_is_refused_before_anything_is_loaded(stepped, key):
    accelerator, model, optimizer, folder = stepped
    optimizer.state[model.weight][key] = torch.ones(1)
    with pytest.raises(CheckpointError, match="Adam keeps a tensor of a parameter under .*\nname it by text"):
        accelerator.load_state(folder)
    assert model.weight.eq(7).all()


def test_groups_with_keys_that_are_no_strings_are_restored(tmp_path):
    def prepared(note):
        run = Accelerator(cpu=True)
        model = nn.Linear(2, 2)
        group = {"params": model.parameters(), 3: note, ("layer", 1): 2, "$own": 4}
        return run, run.prepare(model, torch.optim.SGD([group], lr=0.1))[1]

    run, _ = prepared("first")
    run.save_state(tmp_path / "saved")
    run.end_training()
    run, optimizer = prepared("second")
    run.load_state(tmp_path / "saved")
    run.end_training()
    (group,) = optimizer.param_groups
    assert (group[3], group["layer", 1], group["$own"]) == ("first", 2, 4)


def test_a_hyperparameter_that_is_not_a_number_is_restored(tmp_path):
    def prepared(rate):
        run = Accelerator(cpu=True)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = rate
        return run, run.prepare(model, optimizer)[1]

    run, _ = prepared(math.nan)
    run.save_state(tmp_path / "saved")
    run.end_training()
    run, optimizer = prepared(0.1)
    run.load_state(tmp_path / "saved")
    run.end_training()
    assert math.isnan(optimizer.param_groups[0]["lr"])


def test_state_that_no_optimizer_takes_is_listed_in_one_order_on_all_ranks(tmp_path):
    def prepared(*more):
        run = Accelerator(cpu=True)
        model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)])
        run.prepare(model, *[kind(model.parameters(), lr=0.1) for kind in more])
        return run, [name for name, _ in model.named_parameters()]

    run, names = prepared(torch.optim.SGD)
    run.save_state(tmp_path / "saved")
    run.end_training()
    run, _ = prepared()
    with pytest.raises(CheckpointError) as refused:
        run.load_state(tmp_path / "saved")
    run.end_training()
    listed = [line.rpartition(" ")[2] for line in str(refused.value).splitlines() if " state of " in line]
    assert listed == names
