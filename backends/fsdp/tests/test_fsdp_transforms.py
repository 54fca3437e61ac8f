"""What is done to a model before it is sharded: compiling its blocks, converting its layers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fsdp_problem import accelerator, distance, net, optimizer_of, plugin, steps_of, train_plainly
from torch import nn

from accel_core import TorchDynamoPlugin

VERSIONS = (1, 2)


def compiled(version: int) -> tuple[list[float], int, Any]:
    from torch._dynamo.utils import counters

    # dynamo reads it of gathered weights
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    dynamo = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    run = accelerator(plugin("gpt", version), dynamo)
    model = net("gpt")
    model, optimizer = run.prepare(model, optimizer_of(model))
    losses = list(steps_of(run, model, optimizer, "gpt", range(3)))
    weights = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return losses, counters["frames"]["ok"], weights


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.by_default("2")
def test_blocks_are_compiled_and_then_sharded(version: int, run_processes) -> None:
    plain = train_plainly("gpt", 3)
    for losses, frames, weights in run_processes(compiled, version, timeout=110):
        assert frames > 0
        assert losses == pytest.approx(plain[0], abs=1e-5)
        assert distance(weights, plain[1]) < 1e-5


def low(number: int) -> tuple[list[float], list[float], int]:
    warnings.simplefilter("ignore")  # of torchao's own import, for kernels that need a GPU
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    def converted() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
        return convert_to_float8_training(model)

    run = accelerator(plugin("mlp", 2, auto_wrap_policy="size_based_wrap", min_num_params=500))
    model = converted()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    alone = converted()
    stepper = torch.optim.SGD(alone.parameters(), lr=0.1)
    ours, theirs = [], []
    for step in range(number):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        for losses, trained, backward, each in (
            (ours, model, run.backward, optimizer),
            (theirs, alone, torch.Tensor.backward, stepper),
        ):
            loss = trained(x).square().mean()
            backward(loss)
            each.step()
            each.zero_grad()
            losses.append(loss.item())
    layers = sum(isinstance(module, Float8Linear) for module in model.modules())
    run.end_training()
    return ours, theirs, layers


@pytest.mark.needs("torchao")
def test_layers_converted_to_float8_train_in_parts_as_they_do_whole(run_processes) -> None:
    for ours, theirs, layers in run_processes(low, 5, timeout=110):
        assert layers == 3
        assert ours == pytest.approx(theirs, rel=1e-4)
