"""Clipping in other orders than the usual one: judged by the loop in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_jobs import accelerator
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

pytestmark = pytest.mark.full


def clip_to_two_norms(loop: Any) -> None:
    loop.clip_norm(0.05)
    loop.clip_norm(100.0)


def clip_and_measure(loop: Any) -> None:
    loop.clip_norm(0.05)
    loop.norms.append(loop.clip_norm(float("inf")))


def clip_to_nothing(loop: Any) -> None:
    loop.clip_norm(0.0)


def clamp_after_clipping(loop: Any) -> None:
    loop.clip_norm(0.2)
    loop.clip_value(0.02)


def clamp_between_two_norms(loop: Any) -> None:
    loop.clip_norm(100.0)
    loop.clip_value(0.02)
    loop.norms.append(loop.clip_norm(0.03))


def clip_before_clearing(loop: Any) -> None:
    loop.clip_norm(0.0)
    loop.optimizer.zero_grad()
    loop.backward()


PROGRAMS = [
    clip_to_two_norms,
    clip_and_measure,
    clip_to_nothing,
    clamp_after_clipping,
    clamp_between_two_norms,
    clip_before_clearing,
]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def run(
    program: Callable[[Any], None],
    model: nn.Module,
    optimizer: Any,
    backward: Any,
    norm: Any,
    value: Any,
    part: slice,
) -> list[float]:
    data = torch.linspace(-1, 2, 32).reshape(8, 4)
    loop = SimpleNamespace(
        optimizer=optimizer,
        norms=[],
        backward=lambda: backward(model(data[part]).square().mean()),
        clip_norm=lambda limit: float(norm(model.parameters(), limit)),
        clip_value=lambda limit: value(model.parameters(), limit),
    )
    loop.backward()
    program(loop)
    optimizer.step()
    return loop.norms


def trained(options: dict[str, Any]) -> list[Any]:
    found = []
    for program in PROGRAMS:
        ours = accelerator(**options)
        model = small()
        model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        part = slice(ours.process_index, None, ours.num_processes)
        norms = run(
            program, model, optimizer, ours.backward, ours.clip_grad_norm_, ours.clip_grad_value_, part
        )
        found.append(
            (
                norms,
                {name: each.clone() for name, each in ours.get_state_dict(model, rank0_only=False).items()},
            )
        )
        ours.free_memory()
    return found


def test_clipping_takes_effect_in_the_order_of_its_calls(run_processes) -> None:
    for each_found in run_processes(trained, {}, timeout=100):
        for program, (norms, found) in zip(PROGRAMS, each_found, strict=True):
            model = small()
            optimizer, backward = torch.optim.SGD(model.parameters(), lr=0.1), torch.Tensor.backward
            wanted = run(program, model, optimizer, backward, clip_grad_norm_, clip_grad_value_, slice(None))
            assert norms == pytest.approx(wanted, rel=1e-4), program
            for name, each in model.state_dict().items():
                torch.testing.assert_close(found[name], each, msg=lambda said, of=program: f"{of}: {said}")


def measured(limit: float) -> float:
    """The norm of a step's change, where the configuration clips and the program measures."""
    ours = accelerator(gradient_clipping=limit)
    model = small()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = {name: each.clone() for name, each in ours.get_state_dict(model, rank0_only=False).items()}
    ours.backward(model(torch.ones(2, 4)).square().sum())
    ours.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    after = ours.get_state_dict(model, rank0_only=False)
    return sum(float((after[name] - each).square().sum()) for name, each in before.items()) ** 0.5


def test_a_program_that_only_measures_the_norm_is_clipped_as_configured(run_processes) -> None:
    assert run_processes(measured, 0.1) == pytest.approx([0.1, 0.1], rel=1e-3)
