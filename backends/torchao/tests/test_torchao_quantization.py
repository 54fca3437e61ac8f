"""Quantised weights: what is quantised, and that saved ones come back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from float8_problem import Model, batches, model
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_core import Accelerator, CheckpointError, ConfigError
from accel_torchao import load_quantized, quantize

SCHEMES = ["int8", "int8_dynamic", "int4", "int4_dynamic", "float8"]


class Adapted(nn.Module):
    """A frozen quantised model, and a layer on it that trains."""

    def __init__(self, scheme: str | None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = Model().requires_grad_(False)
        self.top = nn.Linear(16, 16)
        if scheme is not None:
            quantize(self.base, scheme)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.base(ids))


def stepped(net: nn.Module) -> tuple[Accelerator, Any, torch.Tensor]:
    run = Accelerator(device="cpu")
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    net, optimizer = run.prepare(net, torch.optim.SGD(trained, lr=0.1))
    ids = batches(1)[0]
    run.backward(net(ids).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return run, net, net(ids).detach()


def quantised(net: nn.Module) -> list[str]:
    return [name for name, tensor in net.named_parameters() if is_traceable_wrapper_subclass(tensor)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_model_is_saved_and_resumed_bit_for_bit(tmp_path: Path, scheme: str) -> None:
    run, net, output = stepped(Adapted(scheme))
    assert quantised(net) == ["base.first.weight", "base.block.up.weight", "base.block.down.weight"]
    run.save_state(tmp_path / "state")
    run.save_model(net, tmp_path / "model", safe_serialization=False)
    run.end_training()
    again, other, before = stepped(Adapted(scheme, seed=1))
    assert not torch.equal(before, output)
    again.load_state(tmp_path / "state")
    assert torch.equal(other(batches(1)[0]), output)
    again.end_training()
    loaded = load_quantized(Adapted(None, seed=2), tmp_path / "model")
    assert quantised(loaded) == quantised(net)
    assert torch.equal(loaded(batches(1)[0]), output)
    assert not loaded.base.block.up.weight.requires_grad
    assert loaded.top.weight.requires_grad


def test_loaded_models_keep_their_ties(tmp_path: Path) -> None:
    run = Accelerator(device="cpu")
    net = run.prepare(quantize(model(), "int8"))
    run.save_model(net, tmp_path, safe_serialization=False)
    run.end_training()
    with torch.device("meta"):
        again = Model()
    again = load_quantized(again, tmp_path)
    assert again.head.weight is again.words.weight
    assert torch.equal(again(batches(1)[0]), net(batches(1)[0]))
    with pytest.raises(ConfigError, match="no linear layer of the Model is selected"):
        quantize(again, "int4")


def test_another_scheme_is_refused_and_nothing_touched(tmp_path: Path) -> None:
    run, _, _ = stepped(Adapted("int8"))
    run.save_state(tmp_path / "state")
    run.end_training()
    again, net, output = stepped(Adapted("int4", seed=1))
    with pytest.raises(CheckpointError, match="base.first.weight"):
        again.load_state(tmp_path / "state")
    assert torch.equal(net(batches(1)[0]), output)
    again.end_training()


def test_files_that_do_not_fit_are_refused_by_name_and_nothing_touched(tmp_path: Path) -> None:
    run = Accelerator(device="cpu")
    net = run.prepare(quantize(model(), "int8"))
    run.save_model(net, tmp_path, safe_serialization=False, max_shard_size="4KB")
    run.end_training()
    other = model()
    nn.init.zeros_(other.first.weight)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    first, *_ = sorted(tmp_path.glob("*.bin"))
    content = first.read_bytes()
    first.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{first.name} cannot be read"):
        load_quantized(other, tmp_path)
    first.unlink()
    with pytest.raises(CheckpointError, match="does not fit this Model: the files lack "):
        load_quantized(other, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_buffers_without_values_are_refused_by_name(tmp_path: Path) -> None:
    run = Accelerator(device="cpu")
    net = run.prepare(quantize(model(), "int8"))
    run.save_model(net, tmp_path, safe_serialization=False)
    run.end_training()
    with torch.device("meta"):
        other = Model()
        other.register_buffer("steps", torch.ones(2), persistent=False)
    with pytest.raises(CheckpointError, match="steps is on the meta device, and no checkpoint has it"):
        load_quantized(other, tmp_path)


def test_safetensors_are_refused_with_the_remedy(tmp_path: Path) -> None:
    run, net, _ = stepped(Adapted("int8"))
    with pytest.raises(CheckpointError, match=r"is a Int8Tensor.*\nsave with safe_serialization=False"):
        run.save_model(net, tmp_path)
    run.end_training()
    with pytest.raises(ConfigError, match=r"has no pytorch_model\*.bin"):
        load_quantized(model(), tmp_path)


def test_patterns_choose_layers_and_tied_ones_stay() -> None:
    assert quantised(quantize(model(), "int8", only=r"block\..*", skip=".*down")) == ["block.up.weight"]
    with pytest.raises(ConfigError, match="no linear layer of the Model is selected"):
        quantize(model(), "int8", only="head")


def test_what_cannot_be_here_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"'int3' is not a scheme\nchoose among int8"):
        quantize(model(), "int3")
    with pytest.raises(ConfigError, match=r"skip='\(' is not a regular expression: .*\nescape it, or fix it"):
        quantize(Model(), "int8", skip="(")
    with pytest.raises(ConfigError, match="scheme 'float8_dynamic' cannot be used here: AssertionError"):
        quantize(model(), "float8_dynamic")


def test_memory_that_runs_out_is_not_the_schemes_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao import quantization

    def run_out(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 2.00 GiB")

    monkeypatch.setattr(quantization, "quantize_", run_out)
    with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 2\.00 GiB"):
        quantize(model(), "int8")


def test_quantisation_aware_training_around_a_run() -> None:
    """As docs say: torchao's prepare step, ordinary training, its convert step."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.qat import QATConfig

    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4)
    net = model()
    names = list(net.state_dict())
    quantize_(net, QATConfig(base, step="prepare"))
    run = Accelerator(device="cpu")
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for ids in batches():
        run.backward(net(ids).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert list(net.state_dict()) == names
    assert [name for name, tensor in net.state_dict().items() if torch.equal(tensor, before[name])] == []
    net = run.unwrap_model(net)
    run.end_training()
    quantize_(net, QATConfig(base, step="convert"))
    assert "block.up.weight" in quantised(net)
