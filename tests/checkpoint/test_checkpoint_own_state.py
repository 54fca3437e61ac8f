"""State that modules put into their own `state_dict` is saved, exported and loaded, or refused by name."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from accel_core import Accelerator, CheckpointError


class Table(nn.Linear):
    """Keeps a tensor beside its buffers."""

    def __init__(self, *args):
        super().__init__(*args)
        self.table = torch.arange(3.0)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}table"] = self.table

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.table = state_dict.pop(f"{prefix}table")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Whole(nn.Sequential):
    """Overrides what one calls."""

    epoch = 0

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), "epoch": torch.tensor(self.epoch)}

    def load_state_dict(self, state_dict, strict=True):
        state_dict = dict(state_dict)
        self.epoch = int(state_dict.pop("epoch"))
        return super().load_state_dict(state_dict, strict)


class Hooked(nn.Linear):
    """Adds to it by one hook, and takes it back by another."""

    version = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(module, state, prefix, _):
        state[f"{prefix}extra"] = torch.tensor([module.version])

    @staticmethod
    def _take(module, state, prefix, *_):
        module.version = int(state.pop(f"{prefix}extra"))


@pytest.fixture
def accelerator():
    made = Accelerator(device="cpu")
    yield made
    made.end_training()


MODELS = {
    "table": (lambda: nn.Sequential(Table(2, 2)), "0.table", lambda m: setattr(m[0], "table", torch.ones(3))),
    "whole": (lambda: Whole(nn.Linear(2, 2)), "epoch", lambda m: setattr(m, "epoch", 5)),
    "hooked": (lambda: nn.Sequential(Hooked(2, 2)), "0.extra", lambda m: setattr(m[0], "version", 5)),
    "checkpointed": (
        lambda: nn.Sequential(checkpoint_wrapper(Table(2, 2))),
        "0.table",
        lambda m: setattr(m[0]._checkpoint_wrapped_module, "table", torch.ones(3)),
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_it_goes_out_and_comes_back(accelerator, tmp_path, kind):
    make, key, change = MODELS[kind]
    model = accelerator.prepare(make())
    change(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    found = accelerator.get_state_dict(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    accelerator.save_model(model, tmp_path / "model")
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")[key], expected[key])
    accelerator.save_state(tmp_path / "ck")
    second = Accelerator(device="cpu")
    other = second.prepare(make())
    second.load_state(tmp_path / "ck")
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    second.end_training()


class Renamed(nn.Module):
    """Is known to others by older names: by a hook on the names of its child, which nothing undoes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self._register_state_dict_hook(self._rename)

    @staticmethod
    def _rename(_, state, prefix, __):
        for key in [key for key in state if key.startswith(f"{prefix}inner.")]:
            state[key.replace("inner.", "old.")] = state.pop(key)


def test_weights_that_a_hook_renames_are_exported_once_under_their_new_names(accelerator, tmp_path):
    model = accelerator.prepare(nn.Sequential(Renamed()))
    expected = model.state_dict()
    assert [*expected] == ["0.old.weight", "0.old.bias"]
    found = accelerator.get_state_dict(model)
    assert [*found] == [*expected]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [name for name, _ in accelerator.iter_weights(model)] == [*expected]
    accelerator.save_model(model, tmp_path / "model")
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == expected.keys()


def test_weights_that_a_hook_renames_are_saved_under_their_own_names(accelerator, tmp_path):
    model = accelerator.prepare(nn.Sequential(Renamed()))
    accelerator.save_state(tmp_path / "ck")
    before = model[0].inner.weight.detach().clone()
    nn.init.zeros_(model[0].inner.weight)
    accelerator.load_state(tmp_path / "ck")
    assert torch.equal(model[0].inner.weight, before)


class OwnWeight(nn.Linear):
    """Has its weight for extra state."""

    def get_extra_state(self):
        return self.weight

    def set_extra_state(self, state):
        self.weight.data.copy_(state)


def test_extra_state_that_is_a_weight_is_refused_by_name(accelerator, tmp_path):
    model = accelerator.prepare(nn.Sequential(OwnWeight(2, 2)))
    for export in (
        lambda: accelerator.get_state_dict(model),
        lambda: accelerator.save_model(model, tmp_path / "model"),
        lambda: accelerator.save_state(tmp_path / "ck"),
    ):
        with pytest.raises(CheckpointError, match=r"0\._extra_state of the Sequential is its 0\.weight"):
            export()


class Counting(nn.Linear):
    """Adds to its `state_dict` by a hook, and takes nothing back."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_state_dict_post_hook(self._add)

    @staticmethod
    def _add(_, state, prefix, __):
        state[f"{prefix}steps"] = torch.tensor(3)


def test_a_hook_that_only_saves_is_noticed_by_the_save(accelerator, tmp_path, caplog):
    accelerator.prepare(nn.Sequential(Counting(2, 2), Hooked(2, 2)))
    accelerator.save_state(tmp_path / "ck")
    accelerator.save_state(tmp_path / "again")
    (told,) = [text for text in caplog.messages if "state_dict" in text]
    assert "0.steps" in told
    assert "Counting" in told
    assert "1.extra" not in told


class Scaled(nn.Parameter):
    """Keeps its scale in an attribute, as quantised weights of some libraries do."""

    scale: torch.Tensor


class Scaling(nn.Linear):
    """Tells of its weight's scale, which nothing takes back."""

    def __init__(self, scale):
        super().__init__(2, 2, False)
        self.weight = Scaled(self.weight.detach())
        self.weight.scale = torch.full((3,), scale)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = self.weight.scale


def test_what_a_weight_keeps_in_attributes_is_stored(accelerator, tmp_path):
    model = accelerator.prepare(nn.Sequential(Scaling(2.0)))
    accelerator.save_model(model, tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == model.state_dict().keys()
    assert torch.equal(exported["0.weight.scale"], torch.full((3,), 2.0))


def test_what_no_module_takes_back_is_refused_unless_it_is_the_same(accelerator, tmp_path):
    model = accelerator.prepare(nn.Sequential(Scaling(2.0)))
    expected = model[0].weight.detach().clone()
    accelerator.save_state(tmp_path / "ck")
    nn.init.zeros_(model[0].weight)
    accelerator.load_state(tmp_path / "ck")
    assert torch.equal(model[0].weight, expected)
    second = Accelerator(device="cpu")
    other = second.prepare(nn.Sequential(Scaling(5.0)))
    before = other[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"Scaling takes no notice of its weight\.scale"):
        second.load_state(tmp_path / "ck")
    assert torch.equal(other[0].weight, before)
    second.end_training()


@pytest.mark.parametrize("scale", [2.0, float("nan")])
def test_a_parameter_that_no_module_takes_back_is_the_same_as_the_stored_tensor(accelerator, tmp_path, scale):
    model = accelerator.prepare(nn.Sequential(Scaling(scale)))
    model[0].weight.scale = nn.Parameter(model[0].weight.scale)
    expected = model[0].weight.detach().clone()
    accelerator.save_state(tmp_path / "ck")
    nn.init.zeros_(model[0].weight)
    accelerator.load_state(tmp_path / "ck")
    assert torch.equal(model[0].weight, expected)


@pytest.mark.filterwarnings("ignore")  # torch will drop these layers
def test_quantised_layers_are_refused_by_name(accelerator, tmp_path):
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no quantised layers")
    quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
    model = accelerator.prepare(quantised)
    assert accelerator.get_state_dict(model).keys() == model.state_dict().keys()
    with pytest.raises(CheckpointError, match=r"0\._packed_params\._packed_params .*cannot be stored"):
        accelerator.save_state(tmp_path / "ck")


@pytest.mark.parametrize("name", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_a_child_that_is_called_as_torchs_wrappers_call_theirs_keeps_its_name(accelerator, tmp_path, name):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2)
            self.add_module(name, nn.Linear(2, 2))

    model = accelerator.prepare(Odd())
    assert accelerator.get_state_dict(model).keys() == model.state_dict().keys()
    accelerator.save_state(tmp_path / "ck")
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    accelerator.load_state(tmp_path / "ck")
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_buffers_that_a_module_does_not_keep_stay_as_they_are(accelerator, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    model[1].register_buffer("scratch", torch.zeros(2), persistent=False)
    model = accelerator.prepare(model)
    accelerator.save_state(tmp_path / "ck")
    for buffer in model.buffers():
        buffer.fill_(5)
    accelerator.load_state(tmp_path / "ck")
    assert model.scratch.tolist() == model[1].scratch.tolist() == [5, 5]
    assert model[1].running_mean.tolist() == [0, 0]


def test_weights_untied_after_prepare_are_saved_as_two(accelerator, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model = accelerator.prepare(model)
    model[1].weight = nn.Parameter(torch.full((2, 2), 9.0))
    assert torch.equal(accelerator.get_state_dict(model)["1.weight"], torch.full((2, 2), 9.0))
    accelerator.save_state(tmp_path / "ck")
    nn.init.zeros_(model[1].weight)
    accelerator.load_state(tmp_path / "ck")
    assert torch.equal(model[1].weight, torch.full((2, 2), 9.0))


def test_lazily_conjugated_weights_are_written_as_what_they_are(accelerator, tmp_path):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor([1 + 2j]).conj())

    accelerator.save_model(accelerator.prepare(Complex()), tmp_path / "model")
    assert load_file(tmp_path / "model" / "model.safetensors")["p"].item() == 1 - 2j


@pytest.mark.parametrize(("thing", "name"), [(3, "int")], ids=str)
def test_what_cannot_be_saved_is_not_registered(thing, name):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(CheckpointError, match=f"register_for_checkpointing: {name} cannot be saved"):
        accelerator.register_for_checkpointing(nn.Linear(1, 1), thing)
    assert not accelerator.run.registered
    accelerator.end_training()
