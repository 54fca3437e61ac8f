"""Stage 3: a forward between a backward and its step, or after it without a graph, changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from deepspeed_problem import accelerator
from torch import Tensor, nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeedPlugin

pytestmark = pytest.mark.full

FORWARDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "with a graph": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
THRESHOLDS = (0, 100_000)
"""Elements up to which stage 3 keeps a weight whole between steps."""
WINDOWS = ((1, None), (2, 0.05))
"""Micro-batches of a window, and the norm to clip to."""


def settings(threshold: int) -> DeepSpeedPlugin:
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    return DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero, "train_micro_batch_size_per_gpu": 6})


def trained(
    ours: Accelerator | None, forward: str, size: int, norm: float | None
) -> tuple[Tensor, list[Tensor]]:
    """The losses of forwards before and after steps, and the weights after three steps.

    ours: None for plain torch.
    """
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if ours is not None:
        model, optimizer = ours.prepare(model, optimizer)
    seen = []

    def evaluate(batch: Tensor) -> None:
        with FORWARDS[forward]():
            seen.append(model(batch).square().mean().item())

    def backward(batches: Tensor) -> None:
        if ours is None:
            (model(batches).square().mean() / size).backward()  # of equal batches: the mean over all ranks
        else:
            ours.backward(model(batches[ours.process_index]).square().mean())
        evaluate(batches[0])

    def finish() -> None:
        if norm is not None:
            clip = nn.utils.clip_grad_norm_ if ours is None else ours.clip_grad_norm_
            clip(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
        evaluate(torch.ones(6, 4))

    for step in range(3):
        for batches in torch.randn(size, 2, 6, 4, generator=torch.Generator().manual_seed(step)):
            if ours is None:
                backward(batches)
                continue
            with ours.accumulate(model):
                backward(batches)
                if ours.sync_gradients:
                    finish()
        if ours is None:
            finish()
    weights = model.state_dict() if ours is None else ours.get_state_dict(model, rank0_only=False)
    return torch.tensor(seen), [tensor.clone() for tensor in weights.values()]


def all_of(threshold: int) -> list[tuple[Tensor, list[Tensor]]]:
    found = []
    for forward in FORWARDS:
        for size, norm in WINDOWS:
            ours = accelerator(settings(threshold), gradient_accumulation_steps=size)
            found.append(trained(ours, forward, size, norm))
            ours.end_training()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_forward_between_backward_and_step_changes_nothing(threshold: int, run_processes) -> None:
    cases = [(forward, *window) for forward in FORWARDS for window in WINDOWS]
    wanted = [trained(None, *case) for case in cases]
    for found in run_processes(all_of, threshold):
        for case, mine, plain in zip(cases, found, wanted, strict=True):
            torch.testing.assert_close(
                mine, plain, rtol=1e-5, atol=1e-6, msg=lambda text, c=case: f"{c}: {text}"
            )
