"""Helpers around a model's weights give what Accelerate's give."""

from __future__ import annotations

import io
from collections import OrderedDict

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import convert_file_size_to_int, find_tied_parameters, retie_parameters, save
from accelerate.utils.modeling import check_device_map, load_state_dict
from peers import needs_accelerate, said
from safetensors.torch import load_file
from torch import nn

MODEL = """
import json, torch
from torch import nn
import accelerate
from accelerate.utils import (calculate_maximum_sizes, clean_state_dict_for_safetensors, compute_module_sizes,
    convert_bytes, dtype_byte_size, find_tied_parameters, get_module_children_bottom_up)
from accelerate.utils.modeling import clean_device_map, convert_file_size_to_int, get_module_leaves
accelerate.PartialState()
inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
model = nn.Sequential(nn.Embedding(5, 4), inner, nn.Linear(4, 5, bias=False))
model[2].weight = model[0].weight
shown = [
    compute_module_sizes(model),
    compute_module_sizes(model, dtype="float16"),
    compute_module_sizes(model, special_dtypes={"0.weight": torch.float64}),
    compute_module_sizes(model, buffers_only=True),
    calculate_maximum_sizes(model),
    find_tied_parameters(model),
    get_module_leaves(compute_module_sizes(model)),
    [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)],
    [convert_bytes(size) for size in (1, 2048, 5e7, 1e15)],
    [dtype_byte_size(dtype) for dtype in (torch.bool, torch.bfloat16, torch.float8_e5m2, "float32")],
    clean_device_map({"a": 0, "b.c": 1, "b.d": 1}),
    sorted(clean_state_dict_for_safetensors(model.state_dict())),
    [convert_file_size_to_int(size) for size in ("5GB", "5Gb", "1.5MiB", 7)],
]
print(json.dumps(shown))
"""


@needs_accelerate
def test_sizes_and_names_are_the_same(run_processes):
    for theirs, ours in zip(
        said(run_processes, MODEL, ours=False), said(run_processes, MODEL, ours=True), strict=True
    ):
        assert ours == theirs


def test_ties_that_were_cut_are_tied_again():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    ties = find_tied_parameters(model)
    model[1].weight = nn.Parameter(torch.zeros(2, 2))
    retie_parameters(model, ties)

    assert ties == [["0.weight", "1.weight"]]
    assert model[1].weight is model[0].weight


@pytest.mark.parametrize("size", ["5XB", "GB", -1])
def test_a_size_in_no_known_unit_is_refused(size):
    with pytest.raises(ValueError, match="is not in a valid format"):
        convert_file_size_to_int(size)


def test_a_device_map_that_leaves_weights_out_is_refused():
    with pytest.raises(
        ValueError, match="does not give any device for the following parameters: 1.weight, 1.bias"
    ):
        check_device_map(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), {"0": "cpu"})


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_state_dict_is_read_without_running_code(tmp_path, suffix):
    from accelerate.utils import save

    file = tmp_path / f"model.{suffix}"
    save({"weight": torch.ones(2)}, str(file), safe_serialization=suffix == "safetensors")

    assert torch.equal(load_state_dict(file)["weight"], torch.ones(2))


@pytest.mark.parametrize("write", [save, lambda *arguments, **rest: Accelerator().save(*arguments, **rest)])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_only_other_names_of_one_weight_are_left_out_of_safetensors(tmp_path, write, kind):
    """A state dict of a model with ties is an OrderedDict; of any other dict nothing is lost."""
    whole = torch.arange(4.0)
    tensors = {"low": whole[:2], "high": whole[2:], "all": whole, "turned": whole.view(2, 2).T}
    tensors |= {"again": whole, "one": torch.empty(0), "two": torch.empty(0)}
    write(kind(tensors), tmp_path / "file", safe_serialization=True)
    found = load_file(tmp_path / "file")

    assert sorted(tensors.keys() - found.keys()) == ([] if kind is dict else ["again"])
    assert all(torch.equal(found[name], tensors[name]) for name in found)


@pytest.mark.parametrize("held", [3, {"a": 1}, {1: torch.ones(1)}, {"a": torch.eye(2).to_sparse()}])
def test_what_safetensors_cannot_hold_is_a_mistaken_argument(tmp_path, held):
    with pytest.raises((TypeError, ValueError)):
        Accelerator().save(held, tmp_path / "file", safe_serialization=True)


def test_a_model_with_ties_is_saved_by_hand_and_by_save_model(tmp_path):
    accelerator, torn = Accelerator(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torn[1].weight = torn[0].weight
    model = accelerator.prepare(torn)
    accelerator.save(accelerator.get_state_dict(model), tmp_path / "hand", safe_serialization=True)
    accelerator.save_model(model, tmp_path / "model")

    by_hand, by_it = load_file(tmp_path / "hand"), load_file(tmp_path / "model" / "model.safetensors")
    assert sorted(by_hand) == sorted(by_it) == ["0.bias", "0.weight", "1.bias"]
    assert torch.equal(by_hand["0.weight"], torn[0].weight)


def test_an_object_is_saved_into_an_open_file():
    file = io.BytesIO()
    Accelerator().save({"x": torch.ones(2)}, file)

    assert torch.equal(torch.load(io.BytesIO(file.getvalue()))["x"], torch.ones(2))
