"""One process trains exactly as a plain PyTorch loop does: same seed, same losses, bitwise."""

from __future__ import annotations

import pytest
import torch
from training_problems import our_losses, plain_losses


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_losses_equal_the_plain_loop(accelerator_of, accumulate):
    ours = our_losses(accelerator_of(gradient_accumulation_steps=accumulate), 22)
    assert ours == plain_losses(22, accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_clipping_at_each_boundary_equals_the_plain_loop(accelerator_of, accumulate):
    ours = our_losses(accelerator_of(gradient_accumulation_steps=accumulate), 20, clip=0.1)
    assert ours == plain_losses(20, accumulate=accumulate, clip=0.1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scheduler_steps_once_a_window(accelerator_of, accumulate):
    ours = our_losses(accelerator_of(gradient_accumulation_steps=accumulate), 20, schedule=True)
    assert ours == plain_losses(20, accumulate=accumulate, schedule=True)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_any_torch_optimizer_trains_as_alone(accelerator_of, optimizer):
    assert our_losses(accelerator_of(), 10, optimizer=optimizer) == plain_losses(10, optimizer=optimizer)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_equals_autocast_and_scaler_by_hand(
    accelerator_of, precision, dtype, clip, accumulate
):
    accelerator = accelerator_of(mixed_precision=precision, gradient_accumulation_steps=accumulate)
    assert our_losses(accelerator, 20, clip=clip) == plain_losses(
        20, clip=clip, dtype=dtype, accumulate=accumulate
    )


def test_two_accelerators_of_different_stacks_live_in_one_process(accelerator_of):
    exact, half = accelerator_of(), accelerator_of(mixed_precision="bf16", gradient_accumulation_steps=2)
    assert our_losses(exact, 10) == plain_losses(10)
    assert our_losses(half, 10) == plain_losses(10, accumulate=2, dtype=torch.bfloat16)
    assert (exact.gradient_accumulation_steps, half.gradient_accumulation_steps) == (1, 2)
    assert our_losses(exact, 10) == plain_losses(10)
