"""`torch.autograd.grad` through an engine is no backward of its own: gradients are those of plain PyTorch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from deepspeed_problem import network, sgd, weights, whole_weights
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from accel_core import Accelerator
from accel_deepspeed import DeepSpeedPlugin

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

LOSSES = ("score and penalty", "saliency", "of weights")


def loss_of(name: str, model: Any, step: int, rank: int) -> Tensor:
    """Return a loss that needs gradients, of what the model has put out for this step and rank."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))
    output = model(x.requires_grad_())
    if name == "of weights":
        asked = list(getattr(model, "module", model).parameters())
        found = torch.autograd.grad(output.square().mean(), asked, create_graph=True)
        return output.mean() + torch.stack([each.square().sum() for each in found]).sum()
    if name == "saliency":
        (found,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
        return (output - 1).square().mean() * found.norm()
    (found,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return softplus(-output).mean() + (found.norm(dim=1) - 1).square().mean()


def by_hand(name: str, world: int) -> list[float]:
    model = network()
    optimizer = sgd(model.parameters())
    for step in range(3):
        for rank in range(world):
            (loss_of(name, model, step, rank) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def with_engine(stage: int, name: str, *, whole: bool = False) -> list[float]:
    ours = Accelerator(cpu=True, plugins=[DeepSpeedPlugin(zero_stage=stage)])
    model: Any = network()
    model, optimizer = ours.prepare(model, sgd(model.parameters()))
    for step in range(3):
        with ours.full_parameters(model) if whole else nullcontext():
            ours.backward(loss_of(name, model, step, ours.process_index))
        optimizer.step()
        optimizer.zero_grad()
    found = whole_weights(ours, model)
    ours.end_training()
    return found


def with_all(stage: int) -> list[list[float]]:
    return [with_engine(stage, name, whole=stage == 3) for name in LOSSES]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_of_gradients_moves_weights_as_in_plain_pytorch(stage: int, run_processes) -> None:
    """In stage 3 inside `full_parameters`."""
    expected = [by_hand(name, 2) for name in LOSSES]
    for found in run_processes(with_all, stage, world=2, timeout=200):
        for name, ours, theirs in zip(LOSSES, found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6), name


def by_torch_func(stage: int) -> tuple[Tensor, Tensor]:
    """Return gradients of an input, by `torch.func` through an engine, and without it."""
    ours = Accelerator(cpu=True, plugins=[DeepSpeedPlugin(zero_stage=stage)])
    model: Any = network()
    model, _ = ours.prepare(model, sgd(model.parameters()))
    found = [
        torch.func.grad(lambda x, each=each: each(x).sum())(torch.ones(4, 6)) for each in (model, network())
    ]
    ours.end_training()
    return found[0], found[1]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_torch_func_differentiates_through_an_engine(stage: int, run_processes) -> None:
    ((found, expected),) = run_processes(by_torch_func, stage, world=1, timeout=200)
    assert torch.equal(found, expected)


def looks_at_gradients(stage: int, device: str) -> tuple[list[float], list[float]]:
    """Return weights after steps, without and with `torch.autograd.grad` between clipping and stepping."""
    found = []
    for looks in (False, True):
        ours = Accelerator(
            cpu=True, plugins=[DeepSpeedPlugin(zero_stage=stage, offload_optimizer_device=device)]
        )
        model: Any = network()
        model, optimizer = ours.prepare(model, sgd(model.parameters()))
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).requires_grad_()
            ours.backward((model(x) - 3).square().mean())
            ours.clip_grad_norm_(model.parameters(), 0.5)
            if looks:
                torch.autograd.grad(model(x).sum(), x)
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole_weights(ours, model))
        ours.end_training()
    return found[0], found[1]


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_is_the_same_if_gradients_of_something_else_are_asked_for_before_it(
    stage: int, device: str, run_processes
) -> None:
    ((expected, found),) = run_processes(looks_at_gradients, stage, device, world=1, timeout=200)
    assert found == expected


class Checkpointed(torch.nn.Module):
    """A model of two parts, of which forward leaves no weight in the graph that backward begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(network() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + checkpoint(part, x, use_reentrant=True).mean()
        return x


def checkpointed(stage: int | None) -> list[float]:
    """Return weights after steps; without an engine for None."""
    model: Any = Checkpointed()
    optimizer: Any = sgd(model.parameters())
    ours = None if stage is None else Accelerator(cpu=True, plugins=[DeepSpeedPlugin(zero_stage=stage)])
    if ours is not None:
        model, optimizer = ours.prepare(model, optimizer)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).requires_grad_()
        loss = model(x).square().mean()
        loss.backward() if ours is None else ours.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model) if ours is None else whole_weights(ours, model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_whose_weights_are_all_in_reentrant_checkpoints_is_one(stage: int, run_processes) -> None:
    for found in run_processes(checkpointed, stage, world=2, timeout=200):
        assert found == pytest.approx(checkpointed(None), abs=1e-6)


def scaled(stage: int) -> list[float]:
    """Return losses in float16, which torch computes without the instructions that DeepSpeed asks for."""
    import deepspeed

    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True
    ours = Accelerator(device="cpu", mixed_precision="fp16", plugins=[DeepSpeedPlugin(zero_stage=stage)])
    model: Any = network()
    model, optimizer = ours.prepare(model, sgd(model.parameters()))
    losses = []
    for _ in range(40):
        x = torch.linspace(-1, 1, 24).reshape(4, 6).half().requires_grad_()
        output = model(x).float()
        (found,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = (found.float().norm(dim=1) - 1).square().mean()
        ours.backward(loss + 0 * output.sum())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ours.end_training()
    return losses


@pytest.mark.parametrize("stage", [1, 2])
def test_a_penalty_is_trained_by_a_scaled_loss_in_float16(stage: int, run_processes) -> None:
    (losses,) = run_processes(scaled, stage, world=1, timeout=200)
    assert losses[-1] < 0.01 < losses[0]
