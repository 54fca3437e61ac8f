"""A checkpoint is quantised while accel-big-models loads it, block by block on its device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from float8_problem import Model, batches, model
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_core import Accelerator, CheckpointError, ConfigError
from accel_testing import run_processes
from accel_torchao import load_quantized, quantize, quantizer

big_models = pytest.importorskip("accel_big_models")
pytestmark = pytest.mark.together


def empty() -> Model:
    with big_models.empty_weights():
        return Model()


def checkpoint(folder: Path) -> Path:
    weights = {name: value for name, value in model().state_dict().items() if name != "head.weight"}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_streamed_model_is_the_one_quantised_whole(tmp_path: Path, scheme: str) -> None:
    target = empty()
    target.first.requires_grad_(False)
    big_models.load(target, checkpoint(tmp_path), convert=quantizer(target, scheme, skip="first"))
    want = quantize(model(), scheme, skip="first")

    assert torch.equal(target(batches(1)[0]), want(batches(1)[0]))
    assert target.head.weight is target.words.weight
    trained = {name for name, value in target.named_parameters() if value.requires_grad}
    assert trained == {name for name, value in want.named_parameters() if value.requires_grad} - {
        "first.weight",
        "first.bias",
    }


def test_it_is_saved_whole_and_safetensors_refuse_it_by_name(tmp_path: Path) -> None:
    target = empty()
    big_models.load(target, checkpoint(tmp_path), convert=quantizer(target, "int8"))
    output = target(batches(1)[0])
    run = Accelerator(cpu=True, strategy="dispatched")
    prepared = run.prepare(target)
    with pytest.raises(CheckpointError, match=r"is a Int8Tensor.*\nsave with safe_serialization=False"):
        run.save_model(prepared, tmp_path / "out")
    run.save_model(prepared, tmp_path / "out", safe_serialization=False)
    run.end_training()
    big_models.undo(target)

    assert torch.equal(target(batches(1)[0]), output)
    assert torch.equal(load_quantized(Model(), tmp_path / "out")(batches(1)[0]), output)


def test_on_a_device_each_block_is_quantised_there(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    # In a process of its own: torch's backward knows only devices that came before the first backward.
    (result,) = run_processes(on_the_simulated_device, str(tmp_path), world=1)
    devices, output, want, kinds = result

    assert devices == {"sim"}
    assert {"Int8Tensor"} < kinds
    torch.testing.assert_close(output, want)


def on_the_simulated_device(folder: str) -> tuple[set[str], torch.Tensor, torch.Tensor, set[str]]:
    from accel_testing.simulated.device import simulate

    simulate()
    target, seen = empty(), set()
    make = quantizer(target, "int8")

    def convert(name: str, block: nn.Module) -> nn.Module:
        seen.update(tensor.device.type for tensor in block.parameters())
        made = make(name, block)
        for tensor in made.parameters():
            if is_traceable_wrapper_subclass(tensor) and not type(tensor).__name__.startswith("Simulated"):
                seen.add(tensor.qdata.device.type)
        return made

    places = big_models.plan_from_map(target, {"": "sim"})
    big_models.load(target, folder, places, convert=convert)
    with torch.no_grad():
        output = target(batches(1)[0])
        want = quantize(model(), "int8")(batches(1)[0])
    run = Accelerator(device="sim", strategy="dispatched")
    state = run.get_state_dict(run.prepare(target))
    run.end_training()
    return seen, output, want, {type(tensor).__name__ for tensor in state.values()}


def test_a_plan_whose_blocks_come_and_go_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    target = empty()
    places = big_models.plan_from_map(target, {"": "disk"})
    with pytest.raises(ConfigError, match="neither come and go nor stay in their file"):
        big_models.load(target, checkpoint(tmp_path), places, convert=quantizer(target, "int8"))
    assert all(value.is_meta for value in target.parameters())
