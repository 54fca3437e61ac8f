"""Hooks called directly have Accelerate's mechanics: offloaded weights are on the meta device."""

from __future__ import annotations

import copy
import inspect
import pickle

import accelerate.hooks
import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import (
    OffloadedWeightsLoader,
    offload_state_dict,
    set_module_tensor_to_device,
)
from accelerate.utils.modeling import has_offloaded_params, load_offloaded_weights
from peers import needs_accelerate, said
from torch import nn


class AddOne(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + 1, *args[1:]), kwargs

    def post_forward(self, module, output):
        return output + 1


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_hooked_module_is_copied_with_its_hooks(copied):
    model, x = nn.Linear(2, 2), torch.randn(3, 2)
    wanted = model(x + 2) + 2
    add_hook_to_module(model, AddOne())
    add_hook_to_module(model, AddOne(), append=True)

    twin = copied(model)
    torch.testing.assert_close(twin(x), wanted)
    with torch.no_grad():
        model.weight.zero_()
    torch.testing.assert_close(twin(x), wanted)
    assert list(inspect.signature(twin.forward).parameters) == ["input"]


def test_a_removed_hook_leaves_the_module_as_it_was():
    model = net()
    before = set(vars(model[0]))
    add_hook_to_module(model[0], AddOne())
    add_hook_to_module(model, SequentialHook(AddOne(), AddOne()))
    remove_hook_from_submodules(model)

    assert set(vars(model[0])) - before == {"forward"}
    assert not hasattr(model, "_hf_hook")


def test_offloaded_weights_are_on_meta_between_forwards_and_come_back_when_the_hook_goes():
    model, x = net().eval(), torch.randn(2, 3)
    wanted = model(x)
    attach_align_device_hook(model, torch.device("cpu"), offload=True)

    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert torch.equal(model(x), wanted)
    hook = model[0]._hf_hook
    hook.pre_forward(model[0])
    assert model[0].weight.device.type == "cpu"
    hook.post_forward(model[0], ())
    assert has_offloaded_params(model[0])
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), wanted)


def test_a_hook_can_be_made_again_from_its_class_name_and_attributes():
    model = nn.Linear(2, 2)
    hook = AlignDevicesHook("cpu", offload=True, io_same_device=True, skip_keys="cache")
    add_hook_to_module(model, hook)
    kind = getattr(accelerate.hooks, type(hook).__name__)
    names = list(inspect.signature(kind.__init__).parameters)[1:]
    again = kind(**{name: vars(hook)[name] for name in names})

    assert repr(again) == repr(hook)
    assert again.weights_map is hook.weights_map
    assert hook.original_devices == {"weight": torch.device("cpu"), "bias": torch.device("cpu")}


def test_tied_weights_are_brought_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    copies = {model[0].weight.data_ptr(): {}}
    for layer in model:
        set_module_tensor_to_device(
            layer, "weight", "cpu", value=model[0].weight.data, tied_params_map=copies
        )
    assert model[1].weight is model[0].weight
    assert isinstance(model[0].weight, nn.Parameter)


def test_of_a_pipeline_one_module_is_on_the_device_at_a_time(monkeypatch):
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, _ = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=hook)
    calls = []
    monkeypatch.setattr(type(hook), "offload", lambda self: calls.append(self.model))
    monkeypatch.setattr(first, "parameters", lambda: iter([torch.empty(1, device="meta")]))
    second(torch.zeros(1, 2))

    assert calls == [first]
    assert isinstance(second._hf_hook, CpuOffload)
    hook.remove()
    assert not hasattr(first, "_hf_hook")


@pytest.mark.parametrize("pattern", ["head", ("body", "head")])
def test_weights_are_stored_in_one_dtype_and_compute_in_another(pattern):
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=pattern)

    assert model["head"].weight.dtype == model["norm"].weight.dtype == torch.float32
    assert model["body"].weight.dtype == (torch.float8_e4m3fn if pattern == "head" else torch.float32)
    assert model["body"](torch.ones(1, 2)).dtype == torch.float32


FOLDER = """
import json, sys, torch
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict
torch.manual_seed(0)
state = {
    "half": torch.randn(2, 3).bfloat16(), "small": torch.randn(4).to(torch.float8_e4m3fn),
    "number": torch.tensor(3), "flag": torch.tensor([True, False]), "turned": torch.randn(3, 2).T,
}
if WRITES:
    offload_state_dict(FOLDER, state)
found = OffloadedWeightsLoader(save_folder=FOLDER)
same = all(torch.equal(found[name].float(), state[name].float()) for name in state)
print(json.dumps([same, [str(found[name].dtype) for name in state], json.load(open(FOLDER + "/index.json"))]))
"""


@needs_accelerate
@pytest.mark.parametrize("ours", [True, False])
def test_a_folder_that_one_writes_the_other_reads(tmp_path, ours, run_processes):
    code = FOLDER.replace("FOLDER", repr(str(tmp_path)))
    written = said(run_processes, code.replace("WRITES", "True"), ours=ours)
    read = said(run_processes, code.replace("WRITES", "False"), ours=not ours)

    assert written[0]
    assert read == written


def test_a_folder_that_is_written_again_leaves_who_reads_it_alone(tmp_path):
    offload_state_dict(tmp_path, {"weight": torch.ones(1000)})
    before = OffloadedWeightsLoader(save_folder=tmp_path)["weight"]
    offload_state_dict(tmp_path, {"weight": torch.zeros(1000)})

    assert before.sum() == 1000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index.json", "weight.dat"]


def test_a_cut_file_is_named(tmp_path):
    offload_state_dict(tmp_path, {"weight": torch.ones(1000)})
    (tmp_path / "weight.dat").write_bytes(b"1234")
    with pytest.raises(OSError, match=r"weight.dat holds 4 bytes, but its index says torch.float32 of shape"):
        OffloadedWeightsLoader(save_folder=tmp_path)["weight"]


def test_a_folders_weights_come_into_a_model(tmp_path):
    model = nn.Linear(2, 2)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload_state_dict(tmp_path, state)
    for name in state:
        set_module_tensor_to_device(model, name, "meta")
    load_offloaded_weights(model, OffloadedWeightsLoader(save_folder=tmp_path).index, str(tmp_path))

    assert torch.equal(model.weight, state["weight"])
    remove_hook_from_module(model)
