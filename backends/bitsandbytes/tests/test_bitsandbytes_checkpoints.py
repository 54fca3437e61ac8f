"""Checkpoints and exports hold all of a quantised weight: another process computes the same, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from quantised_problem import KINDS, QUANTISED, TIMEOUT, Model, config, empty, ids, model
from safetensors.torch import load_file
from torch import nn

from accel_bitsandbytes import BitsAndBytesPlugin, adopt, load_and_quantize_model, report
from accel_core import Accelerator, CheckpointError, ConfigError


def prepared(net: nn.Module, *plugins: Any) -> tuple[Accelerator, Any]:
    run = Accelerator(device="cpu", plugins=[TIMEOUT, *plugins])
    return run, run.prepare(net)


def resumed(kind: str, folder: Path, seed: int) -> torch.Tensor:
    """Quantise other weights, load the checkpoint, and compute."""
    run, net = prepared(load_and_quantize_model(model(seed), config(kind)))
    run.load_state(folder)
    output = net(ids()).detach()
    run.end_training()
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_restores_weights_and_scales_over_other_ones(tmp_path: Path, kind: str) -> None:
    run, net = prepared(load_and_quantize_model(model(), config(kind)))
    expected = net(ids()).detach()
    run.save_state(tmp_path / "state")
    run.save_model(net, tmp_path / "export")
    run.end_training()
    other = load_and_quantize_model(model(7), config(kind))
    assert not torch.equal(other(ids()), expected)
    assert torch.equal(resumed(kind, tmp_path / "state", 7), expected)
    again = load_and_quantize_model(empty(), config(kind), tmp_path / "export")
    assert torch.equal(again(ids()), expected)
    once_more = load_and_quantize_model(empty(), config(kind), tmp_path / "state")
    assert torch.equal(once_more(ids()), expected)
    assert [
        name for name, each in again.named_modules() if isinstance(each, type(net.blocks[0].up))
    ] == QUANTISED
    assert not again.blocks[0].up.weight.requires_grad


def test_another_process_resumes(tmp_path: Path, run_processes) -> None:
    run, net = prepared(load_and_quantize_model(model(), config("nf4, double")))
    expected = net(ids()).detach()
    run.save_state(tmp_path / "state")
    run.end_training()
    (output,) = run_processes(resumed, "nf4, double", tmp_path / "state", 3, world=1)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_what_bitsandbytes_writes(tmp_path: Path, kind: str) -> None:
    net = load_and_quantize_model(model(), config(kind))
    run, prepared_net = prepared(net)
    run.save_model(prepared_net, tmp_path)
    run.end_training()
    exported = load_file(tmp_path / "model.safetensors")
    layer = net.blocks[0].up
    theirs: Any = bnb.nn.Linear8bitLt if config(kind).load_in_8bit else bnb.nn.Linear4bit
    expected: dict[str, Any] = {}
    theirs._save_to_state_dict(layer, expected, "blocks.0.up.", False)
    expected.pop("blocks.0.up.weight.offset", None)
    assert expected.keys() == {name for name in exported if name.startswith("blocks.0.up.")}
    for name, tensor in expected.items():
        if "quant_state" in name:
            assert bytes(exported[name].tolist()).rstrip() == bytes(tensor.tolist()).rstrip()
        else:
            assert torch.equal(exported[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"), [("nf4", "fp4"), ("nf4", "int8"), ("int8", "nf4, double")]
)
def test_a_checkpoint_of_another_kind_is_refused_and_nothing_touched(
    tmp_path: Path, saved_as: str, loaded_as: str
) -> None:
    run, net = prepared(load_and_quantize_model(model(), config(saved_as)))
    run.save_state(tmp_path / "state")
    run.save_model(net, tmp_path / "export")
    run.end_training()
    run, net = prepared(load_and_quantize_model(model(7), config(loaded_as)))
    before = net(ids())
    with pytest.raises(CheckpointError, match=r"blocks\.0\.up"):
        run.load_state(tmp_path / "state")
    assert torch.equal(net(ids()), before)
    run.end_training()
    with pytest.raises(ConfigError, match=r"the checkpoint is quantised as .*, but the config says"):
        load_and_quantize_model(empty(), config(loaded_as), tmp_path / "export")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_state_dict_of_full_weights_is_refused(kind: str) -> None:
    net = load_and_quantize_model(model(), config(kind))
    before = net(ids())
    with pytest.raises(
        RuntimeError, match=r"blocks\.0\.up\.weight is torch\.float32 in the state dict and quantised"
    ):
        net.load_state_dict(model(7).state_dict(), strict=False)
    assert torch.equal(
        net.blocks[0](torch.ones(64)),
        load_and_quantize_model(model(), config(kind)).blocks[0](torch.ones(64)),
    )
    twin = load_and_quantize_model(model(7), config(kind))
    twin.load_state_dict(load_and_quantize_model(model(), config(kind)).state_dict())
    assert torch.equal(twin(ids()), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_stays_in_its_file_on_disk(tmp_path: Path, kind: str) -> None:
    run, net = prepared(load_and_quantize_model(model(), config(kind)))
    expected = net(ids()).detach()
    run.save_model(net, tmp_path / "export")
    run.end_training()
    away = tmp_path / "away"
    places = {"words": "cpu", "blocks": "disk", "head": "cpu"}
    net = load_and_quantize_model(
        empty(), config(kind), tmp_path / "export", device_map=places, offload_folder=away
    )
    assert torch.equal(net(ids()), expected)
    assert not list(away.rglob("weights"))


def foreign(kind: str, seed: int = 0) -> Model:
    """A model with bitsandbytes' own layers."""
    net, options = model(seed), config(kind)
    for name in QUANTISED:
        layer = net.get_submodule(name)
        sizes = (layer.in_features, layer.out_features, layer.bias is not None)
        if options.load_in_8bit:
            made: Any = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
        else:
            made = bnb.nn.Linear4bit(*sizes, torch.float32, quant_type=options.bnb_4bit_quant_type)
        made.load_state_dict(layer.state_dict())
        net.set_submodule(name, made)
    return net.to("cpu")


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_extension_keeps_models_of_other_loaders_whole(tmp_path: Path, kind: str, used: bool) -> None:
    net = foreign(kind)
    if used:
        net.eval()(ids())
    run, net = prepared(net, BitsAndBytesPlugin())
    expected = net.train()(ids()).detach()
    assert "by bitsandbytes, quantised before: blocks.0.up.weight" in str(run.explain())
    run.save_state(tmp_path / "state")
    run.end_training()
    run, again = prepared(foreign(kind, 7), BitsAndBytesPlugin())
    run.load_state(tmp_path / "state")
    assert torch.equal(again(ids()), expected)
    run.end_training()


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_without_the_extension_scales_are_stored_too(tmp_path: Path, kind: str) -> None:
    run, net = prepared(foreign(kind))
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    run.save_model(net, tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())
    run.save_state(tmp_path / "state")
    run.load_state(tmp_path / "state")
    run.end_training()


def test_without_the_extension_scales_of_another_model_are_refused(tmp_path: Path) -> None:
    run, _ = prepared(foreign("nf4"))
    run.save_state(tmp_path / "state")
    run.end_training()
    run, net = prepared(foreign("nf4", 7))
    before = net(ids()).detach()
    with pytest.raises(CheckpointError, match=r"takes no notice of its weight\.absmax"):
        run.load_state(tmp_path / "state")
    assert torch.equal(net(ids()), before)
    run.end_training()


def test_adopting_twice_changes_nothing() -> None:
    net = foreign("nf4")
    assert adopt(net) == QUANTISED
    assert adopt(net) == []
    assert report(net) == "no layer was quantised here"
