"""fp8 by torchao, as programs written for Accelerate ask for it; needs accel-torchao."""

from __future__ import annotations

import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs
from torch import nn

pytestmark = pytest.mark.needs("accel-torchao")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torchao's own import, for kernels that need a GPU
    torchao = pytest.importorskip("torchao.float8")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def trained(*handlers):
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=list(handlers))
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(4, 16)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model


def test_every_converted_weight_trains_at_the_defaults():
    accelerator, model = trained()
    assert accelerator.fp8_backend == "AO"
    assert accelerator.fp8_enabled
    assert [type(layer).__name__ for layer in model] == ["Linear", "Float8Linear", "Float8Linear", "Linear"]
    before = net().state_dict()
    assert [name for name, value in model.state_dict().items() if torch.equal(value, before[name])] == []
    assert model[1].config.pad_inner_dim


def test_fp8_that_the_launcher_asks_for_is_told(monkeypatch):
    assert not Accelerator(cpu=True).fp8_enabled
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    accelerator = Accelerator(cpu=True)
    assert (accelerator.fp8_enabled, accelerator.fp8_backend) == (True, "AO")


def test_a_filter_and_a_config_do_what_they_say():
    config = torchao.Float8LinearConfig.from_recipe_name("rowwise")
    recipe = AORecipeKwargs(config=config, module_filter_func=lambda module, name: name in ("0", "3"))
    _, model = trained(recipe)
    assert [type(layer).__name__ for layer in model] == ["Float8Linear", "Linear", "Linear", "Float8Linear"]
    assert model[0].config == config


def test_weights_are_gathered_in_fp8_under_fsdp2_only(monkeypatch):
    assert AORecipeKwargs().under(fsdp2=True).all_gather
    assert not AORecipeKwargs().under(fsdp2=False).all_gather
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    assert AORecipeKwargs(config=config).under(fsdp2=True).gathers
    assert not AORecipeKwargs(config=config).to_ours().gathers
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    assert not AORecipeKwargs().to_ours().pad_inner_dim


def test_a_model_is_converted_by_hand_but_for_its_ends():
    from accelerate.utils.ao import convert_model_to_fp8_ao, find_first_last_linear_layers, has_ao_layers

    model = net()
    assert find_first_last_linear_layers(model) == ("0", "3")
    assert not has_ao_layers(model)
    convert_model_to_fp8_ao(model)
    assert [type(layer).__name__ for layer in model] == ["Linear", "Float8Linear", "Float8Linear", "Linear"]
    assert has_ao_layers(model)


def test_the_library_that_the_launcher_names_is_taken(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    with pytest.raises(NotImplementedError, match="MS-AMP is no longer maintained"):
        Accelerator(cpu=True)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "tee")
    with pytest.raises(ValueError, match="ACCELERATE_FP8_BACKEND: tee is not one of ao, te, msamp"):
        Accelerator(cpu=True)
