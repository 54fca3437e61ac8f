"""Models that are offloaded give the resident model's outputs, and lose no weight."""

from __future__ import annotations

import copy
import json
import pickle
import sys

import pytest
import torch
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import align_module_device
from accelerate.utils.modeling import get_state_dict_offloaded_model, has_offloaded_params
from peers import needs_accelerate, said
from safetensors.torch import save_file
from torch import nn

from accel_core import PluginError

pytestmark = pytest.mark.needs("accel-big-models")
DISK = {"0": "disk", "1": "disk", "2": "disk"}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), inner).eval()


def empty() -> nn.Sequential:
    with init_empty_weights():
        return net()


@pytest.fixture
def x():
    return torch.randn(2, 3)


@pytest.fixture
def checkpoint(tmp_path):
    save_file(net().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_weights_on_the_disk_compute_what_resident_ones_do(tmp_path, x):
    model = dispatch_model(net(), DISK, offload_dir=tmp_path)

    assert torch.equal(model(x), net()(x))
    assert model.hf_device_map == DISK
    assert not any(weight.is_meta for weight in model.parameters())
    names = [name for name, _ in net().named_parameters()]
    assert sorted(json.loads((tmp_path / "index.json").read_text())) == sorted(names)


def test_removed_hooks_leave_a_whole_model(tmp_path, x):
    model = dispatch_model(net(), DISK, offload_dir=tmp_path)
    remove_hook_from_submodules(model)

    assert torch.equal(model.to("cpu")(x), net()(x))
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    again = dispatch_model(model, DISK, offload_dir=tmp_path)
    assert torch.equal(again(x), net()(x))


def test_a_folder_of_another_model_is_refused(tmp_path):
    dispatch_model(net(), DISK, offload_dir=tmp_path)
    other = net()
    nn.init.zeros_(other[0].weight)
    with pytest.raises(ValueError, match="holds the offloaded weights of another model: 0.weight differs"):
        dispatch_model(other, DISK, offload_dir=tmp_path)


def test_an_offloaded_model_refuses_to_move_and_its_copy_is_its_own(tmp_path, x, caplog):
    model = dispatch_model(net(), DISK, offload_dir=tmp_path)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), net()(x))
    with pytest.raises(RuntimeError, match="offloaded to cpu or disk"):
        model.to("cpu")
    assert "You shouldn't move a model" in caplog.text


def test_a_single_device_means_to_move_there(x):
    model = dispatch_model(net(), {"": "cpu"})
    assert model.hf_device_map == {"": "cpu"}
    assert not hasattr(model, "_hf_hook")


def test_a_place_on_the_disk_needs_a_folder():
    with pytest.raises(ValueError, match="We need an `offload_dir` to dispatch this model"):
        dispatch_model(net(), DISK)


def test_each_module_with_weights_has_the_hook_that_libraries_look_for(tmp_path):
    model = dispatch_model(net(), DISK, offload_dir=tmp_path, skip_keys="cache")
    hook = model[2][0]._hf_hook

    assert isinstance(hook, AlignDevicesHook)
    assert type(hook).__name__ == "AlignDevicesHook"
    assert (hook.execution_device, hook.offload, hook.skip_keys) == ("cpu", True, "cache")
    assert hook.original_devices == {"weight": torch.device("meta"), "bias": torch.device("meta")}
    assert "2.0.weight" in hook.weights_map.dataset.index
    assert torch.equal(hook.weights_map["weight"], net()[2][0].weight)
    assert has_offloaded_params(model[0])
    assert model._hf_hook.io_same_device
    hook.pre_forward(model[2][0])
    hook.post_forward(model[2][0], ())


def test_skip_keys_reach_the_engine(tmp_path):
    from accel_big_models.hooks import enters_of

    on_disk = dispatch_model(net(), DISK, offload_dir=tmp_path, skip_keys="cache", force_hooks=True)
    from_memory = dispatch_model(net(), {"": "meta"}, force_hooks=True, skip_keys=["cache", "other"])

    assert {tuple(enter.skip_keys) for enter in enters_of(from_memory)} == {("cache", "other")}
    assert all(enter.skip_keys == ["cache"] for enter in enters_of(on_disk))


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_all_of_a_model_is_offloaded(tmp_path, x, offload):
    given = (tmp_path,) if offload is disk_offload else ()
    model = offload(net(), *given)
    model.scale = nn.Parameter(torch.ones(1))

    assert torch.equal(model(x), net()(x))
    assert has_offloaded_params(model[2][1])
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == {*net().state_dict(), "scale"}
    assert all(torch.equal(found[name], value) for name, value in net().state_dict().items())


def test_a_hook_may_be_appended_to_an_offloaded_model(tmp_path, x):
    model = disk_offload(net(), tmp_path)
    add_hook_to_module(model, AlignDevicesHook("cpu", io_same_device=True), append=True)
    assert torch.equal(model(x), net()(x))
    assert isinstance(model._hf_hook.hooks[0], AlignDevicesHook)


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"0": "disk", "1": "cpu", "2": "disk"}, "auto", None])
def test_a_checkpoint_is_read_where_it_is(tmp_path, checkpoint, x, device_map):
    model = load_checkpoint_and_dispatch(empty(), checkpoint, device_map, offload_folder=tmp_path / "off")

    assert torch.equal(model.eval()(x), net()(x))
    assert list(tmp_path.rglob("*.dat")) == []


def test_a_dtype_is_that_of_the_weights_and_of_what_is_saved(tmp_path, checkpoint, x):
    given = {"offload_folder": tmp_path / "off", "dtype": "bfloat16"}
    model = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk"}, **given).eval()
    wanted = net().bfloat16()

    assert torch.equal(model(x.bfloat16()), wanted(x.bfloat16()))
    assert all(torch.equal(value, wanted.state_dict()[name]) for name, value in model.state_dict().items())
    with align_module_device(model[0]):
        assert torch.equal(model[0].weight, wanted[0].weight)
    remove_hook_from_submodules(model)
    assert torch.equal(model[2][0].weight, wanted[2][0].weight)


def test_a_torch_files_weights_are_written_once_in_their_dtype(tmp_path, x):
    torch.save(net().state_dict(), tmp_path / "model.bin")
    load_checkpoint_in_model(model := empty(), tmp_path / "model.bin", DISK, tmp_path / "off", torch.float16)

    assert model[0].weight.is_meta
    assert (tmp_path / "off" / "0.weight.dat").stat().st_size == 2 * 12
    with pytest.raises(ValueError, match="please pass along an `offload_folder`"):
        load_checkpoint_in_model(empty(), tmp_path / "model.bin", DISK)


@pytest.mark.parametrize("device_map", [{}, {"0": "cpu", "1": "cpu"}], ids=str)
def test_weights_that_a_map_leaves_out_are_refused(checkpoint, device_map):
    with pytest.raises(ValueError, match=r"\w doesn't have any device set\.\nname its module"):
        load_checkpoint_in_model(empty(), checkpoint, device_map)


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_a_file_with_one_name_of_a_tied_weight_fills_both(tmp_path, name, device_map):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    save_file({name: torch.full((3, 3), 2.0)}, tmp_path / "model.safetensors")
    load_checkpoint_in_model(model, tmp_path, device_map)

    assert model[0].weight is model[1].weight
    assert torch.equal(model[0].weight, torch.full((3, 3), 2.0))


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
def test_a_tied_weight_on_the_disk_stays_tied_in_another_dtype(tmp_path, name, dtype):
    save_file({name: torch.full((3, 3), 2.0)}, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"}, offload_folder=tmp_path / "away", dtype=dtype)

    assert model[0].weight is model[1].weight
    assert torch.equal(model(torch.ones(1, 3, dtype=dtype)), torch.full((1, 3), 36.0, dtype=dtype))


def test_weights_that_a_checkpoint_lacks_are_named(tmp_path, caplog):
    save_file({"0.weight": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    load_checkpoint_in_model(nn.Linear(3, 4), tmp_path / "model.safetensors")
    assert "not used when initializing Linear: ['0.weight']" in caplog.text
    assert "stay as they are: ['bias', 'weight']" in caplog.text


@pytest.mark.parametrize("cpu", ["cpu", torch.device("cpu")])
def test_a_map_of_device_objects_takes_values_of_a_state_dict(tmp_path, x, cpu):
    places = {"0": cpu, "1": cpu, "2": cpu}
    model = dispatch_model(empty(), places, state_dict=net().state_dict(), force_hooks=True).eval()
    assert torch.equal(model(x), net()(x))


READ = """
import json, torch
from torch import nn
from accelerate import dispatch_model, init_empty_weights
torch.manual_seed(0)
with init_empty_weights():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
dispatch_model(model, {"0": "disk", "1": "disk"}, offload_dir=FOLDER)
print(json.dumps(model(torch.ones(1, 3)).tolist()))
"""


@needs_accelerate
def test_accelerate_reads_the_folder_that_is_left(tmp_path, run_processes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        hollow = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    load_checkpoint_in_model(hollow, tmp_path, {"": "disk"}, tmp_path / "off")
    code = READ.replace("FOLDER", repr(str(tmp_path / "off")))

    assert (
        said(run_processes, code, ours=False)
        == model(torch.ones(1, 3)).tolist()
        == said(run_processes, code, ours=True)
    )


def test_without_the_package_its_name_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accel_big_models", None)
    with pytest.raises(PluginError, match=r"needs accel-big-models(.|\n)*pip install ./contrib/big-models"):
        dispatch_model(net(), DISK, offload_dir=tmp_path)


def test_prepare_leaves_a_model_where_its_map_has_placed_it(tmp_path, x):
    model = dispatch_model(net(), DISK, offload_dir=tmp_path)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)

    assert torch.equal(prepared(x), net()(x))
    accelerator.end_training()
