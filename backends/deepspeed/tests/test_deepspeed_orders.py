"""Clipping and clearing in other orders than the usual one: judged by the loop in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed_problem import accelerator
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from accel_deepspeed import DeepSpeedPlugin

pytestmark = pytest.mark.full


def clip_to_two_norms(loop: Any) -> None:
    loop.backward()
    loop.clip_norm(0.05)
    loop.clip_norm(100.0)
    loop.step()


def clip_and_measure(loop: Any) -> None:
    loop.backward()
    loop.clip_norm(0.05)
    loop.clip_norm(float("inf"))
    loop.step()


def clip_to_nothing(loop: Any) -> None:
    loop.backward()
    loop.clip_norm(0.0)
    loop.step()


def drop_what_is_clipped(loop: Any) -> None:
    loop.backward()
    loop.clip_norm(0.05)
    loop.optimizer.zero_grad()
    loop.backward()
    loop.step()


def clear_by_the_model(loop: Any) -> None:
    loop.backward()
    loop.model.zero_grad()
    loop.backward()
    loop.clip_norm(100.0)
    loop.step()


PROGRAMS = [
    clip_to_two_norms,
    clip_and_measure,
    clip_to_nothing,
    drop_what_is_clipped,
    clear_by_the_model,
]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def loop_of(
    model: nn.Module, optimizer: Any, backward: Any, norm: Any, value: Any, part: slice
) -> SimpleNamespace:
    data = torch.linspace(-1, 2, 32).reshape(8, 4)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        backward=lambda: backward(model(data[part]).square().mean()),
        clip_norm=lambda limit: norm(model.parameters(), limit),
        clip_value=lambda limit: value(model.parameters(), limit),
        step=optimizer.step,
    )


def trained(stage: int, program: Callable[[Any], None]) -> dict[str, torch.Tensor]:
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage))
    model = small()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    part = slice(ours.process_index, None, ours.num_processes)
    program(loop_of(model, optimizer, ours.backward, ours.clip_grad_norm_, ours.clip_grad_value_, part))
    found = {name: each.clone() for name, each in ours.get_state_dict(model, rank0_only=False).items()}
    ours.free_memory()
    return found


def trained_by_each(stage: int) -> list[dict[str, torch.Tensor]]:
    return [trained(stage, program) for program in PROGRAMS]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_and_clearing_take_effect_in_the_order_of_their_calls(stage: int, run_processes) -> None:
    for each_found in run_processes(trained_by_each, stage, timeout=100):
        for program, found in zip(PROGRAMS, each_found, strict=True):
            model = small()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            backward = torch.Tensor.backward
            program(loop_of(model, optimizer, backward, clip_grad_norm_, clip_grad_value_, slice(None)))
            for name, each in model.state_dict().items():
                torch.testing.assert_close(found[name], each, msg=lambda said, of=program: f"{of}: {said}")


def dropped(stage: int) -> list[float]:
    """Return weights after a step whose window came after a backward that was cleared."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    ours = accelerator(DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero}))
    model: Any = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours.backward(model(torch.full((1, 2), 8.0)).sum())
    optimizer.zero_grad()
    ours.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    return [float(each) for _, weight in ours.iter_weights(model) for each in weight.flatten()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_gradients_that_were_cleared_are_not_added_to(stage: int, run_processes) -> None:
    for weights in run_processes(dropped, stage, world=2, timeout=200):
        assert weights == pytest.approx([0.9, 0.9])


def by_two_losses(stage: int) -> list[float]:
    """Return weights after steps of two losses of one forward, each with a backward of its own."""
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage))
    model = small()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        output = model(torch.full((2, 4), 1.0 + step + ours.process_index))
        ours.backward(output.sum(), retain_graph=True)
        ours.backward(output.square().sum())
        ours.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    return [
        float(each)
        for weight in ours.get_state_dict(model, rank0_only=False).values()
        for each in weight.flatten()
    ]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_losses_of_one_forward_add_up(stage: int, run_processes) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in (0, 1):
            output = model(torch.full((2, 4), 1.0 + step + rank))
            ((output.sum() + output.square().sum()) / 2).backward()
        clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    plain = [float(each) for weight in model.state_dict().values() for each in weight.flatten()]
    for found in run_processes(by_two_losses, stage):
        assert found == pytest.approx(plain, rel=1e-5, abs=1e-6)
