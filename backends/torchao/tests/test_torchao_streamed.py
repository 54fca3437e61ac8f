"""A checkpoint is quantised while accel-big-models loads it, block by block on its device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from float8_problem import Model, batches, model
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_core import Accelerator, CheckpointError
from accel_torchao import load_quantized, quantize, quantizer

big_models = pytest.importorskip("accel_big_models")
pytestmark = pytest.mark.needs("accel-big-models")


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


def test_on_a_device_each_block_is_quantised_there(tmp_path: Path, run_processes) -> None:
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
    state = run.get_state_dict(run.prepare(target), rank0_only=False)
    run.end_training()
    return seen, output, want, {type(tensor).__name__ for tensor in state.values()}


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_weights_come_and_go_as_they_are(scheme: str, run_processes) -> None:
    # In a process of its own, as above.
    (results,) = run_processes(streamed, scheme, world=1)

    for output, want, gradients, wanted, kinds in results:
        assert torch.equal(output, want)
        torch.testing.assert_close(gradients, wanted)
        assert kinds & {"Int8Tensor", "IntxUnpackedToInt8Tensor"}


def streamed(scheme: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, set[str]]]:
    """Compute and train an adapter over a base in host memory, mapped from disk, and read from it."""
    from accel_testing.simulated.device import simulate

    simulate()
    results = []
    want, wanted = adapted(quantize(model(), scheme), "cpu")
    for place, mapped in (("cpu", True), ("disk", True), ("disk", False)):
        target = big_models.offload(quantize(model(), scheme), place, device="sim", mapped=mapped)
        output, gradients = adapted(target, "sim")
        state = target.state_dict()
        big_models.undo(target)
        assert torch.equal(adapted(target, "cpu")[0], want)
        results.append((output, want, gradients, wanted, {type(each).__name__ for each in state.values()}))
    return results


def adapted(target: nn.Module, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the gradient of an adapter in front of the block."""
    target.requires_grad_(False)
    torch.manual_seed(3)
    adapter = nn.Linear(32, 32).to(device)
    hook = target.block.norm.register_forward_pre_hook(lambda module, args: (args[0] + adapter(args[0]),))
    output = target(batches(1)[0])
    output.square().mean().backward()
    hook.remove()
    assert adapter.weight.grad is not None
    return output.detach().cpu(), adapter.weight.grad.cpu()


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_block_is_quantised_on_its_device_and_leaves_it(tmp_path: Path, place: str, run_processes) -> None:
    checkpoint(tmp_path)
    ((output, want, held, size, kinds),) = run_processes(away, str(tmp_path), place, world=1)

    assert torch.equal(output, want)
    assert held < size / 2
    assert kinds == {"Parameter", "Int8Tensor"}


def away(folder: str, place: str) -> tuple[torch.Tensor, torch.Tensor, int, int, set[str]]:
    from accel_testing.simulated.device import simulate

    device, target = simulate(), empty()
    places = big_models.plan_from_map(target, {"": "sim", "block": place})
    big_models.load(target, folder, places, convert=quantizer(target, "int8"))
    held = device.memory.allocated
    with torch.no_grad():
        output = target(batches(1)[0]).cpu()
        want = quantize(model(), "int8")(batches(1)[0])
    kinds = {type(each).__name__ for each in target.block.parameters()}
    return output, want, held, sum(each.nbytes for each in model().parameters()), kinds


def test_a_plan_counts_quantised_bytes() -> None:
    target = empty()
    places = big_models.plan(target, {"cpu": "1GB"}, convert=quantizer(target, "int8"))

    quantised = quantize(model(), "int8")
    assert places.used == big_models.plan(quantised, {"cpu": "1GB"}).used
    assert places.used["cpu"] < sum(each.nbytes for each in model().parameters()) / 2
