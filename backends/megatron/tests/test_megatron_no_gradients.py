"""A step after no backward: nothing in plain PyTorch, and an error here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_jobs import MODELS, accelerator, batches
from torch import nn

from accel_core import AccelError

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def weights_of(ours: Any, model: Any) -> torch.Tensor:
    return torch.cat([each.clone().flatten() for each in ours.get_state_dict(model).values()])


def stepped(options: dict[str, Any], own: bool, clips: bool) -> list[Any]:
    """Return what a step says before any backward and after a step, and if it moved a tiny model."""
    ours = accelerator(**options)
    model: Any = nn.Linear(2, 1, bias=False)
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    said: list[Any] = []
    for _ in range(2):
        before = weights_of(ours, model)
        with pytest.raises(AccelError) as caught:
            ours.clip_grad_norm_(model.parameters(), 1.0) if clips else optimizer.step()
        said += [str(caught.value), torch.equal(weights_of(ours, model), before)]
        loss = model(torch.ones(1, 2)).sum()
        loss.backward() if own else ours.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        said.append(torch.equal(weights_of(ours, model), before))
    return said


@pytest.mark.parametrize(
    ("options", "own", "clips"),
    [
        ({}, False, True),
        ({"mixed_precision": "bf16"}, True, False),
        ({"use_distributed_optimizer": True}, True, False),
        ({"other_megatron_args": {"overlap_grad_reduce": True}}, False, False),
    ],
)
def test_a_step_after_no_backward_is_an_error_and_moves_nothing(
    options: dict[str, Any], own: bool, clips: bool, run_processes
) -> None:
    for first, is_still, moves_not, later, is_still_again, moves_not_again in run_processes(
        stepped, options, own, clips
    ):
        for said in (first, later):
            assert said.startswith("megatron: no gradient since the last optimizer.step()")
        assert is_still
        assert is_still_again
        assert not moves_not
        assert not moves_not_again


def in_stages() -> tuple[str, bool]:
    ours = accelerator(pp_degree=2)
    model = MODELS["llama"]()
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    before = weights_of(ours, model)
    with pytest.raises(AccelError) as caught:
        optimizer.step()
    ours.forward_backward(model, batches(2), lambda m, b: (m(**b).loss, None), microbatches=2)
    optimizer.step()
    return str(caught.value), torch.equal(weights_of(ours, model), before)


def test_stages_refuse_a_step_after_no_backward(run_processes) -> None:
    for said, is_still in run_processes(in_stages):
        assert said.startswith("megatron: no gradient")
        assert not is_still


def by_one_rank() -> list[float]:
    """Weights after a step for which only rank 0 did a backward."""
    ours = accelerator()
    model: Any = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    if ours.is_main_process:
        ours.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    found: list[float] = weights_of(ours, model).tolist()
    return found


def test_a_rank_without_a_backward_adds_zeros_to_those_of_others(run_processes) -> None:
    assert run_processes(by_one_rank) == [[-0.5, -0.5]] * 2


def clipped_before_another_backward(steps: bool) -> tuple[str, bool]:
    """Return what clipping again or a step says then, and if weights move after gradients are cleared."""
    ours = accelerator()
    model: Any = nn.Linear(2, 1, bias=False)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = weights_of(ours, model)

    def backward() -> None:
        ours.backward(model(torch.ones(1, 2)).sum())

    backward()
    ours.clip_grad_norm_(model.parameters(), 1.0)
    backward()
    with pytest.raises(AccelError) as caught:
        optimizer.step() if steps else ours.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.equal(weights_of(ours, model), before)
    optimizer.zero_grad()
    backward()
    optimizer.step()
    return str(caught.value), not torch.equal(weights_of(ours, model), before)


@pytest.mark.parametrize("steps", [True, False])
def test_a_backward_after_clipping_is_refused_before_its_gradients_are_lost(
    steps: bool, run_processes
) -> None:
    for said, moves in run_processes(clipped_before_another_backward, steps):
        assert said.startswith("megatron: backward came after clipping or unscaling")
        assert "once, just before optimizer.step()" in said.splitlines()[-1]
        assert moves
