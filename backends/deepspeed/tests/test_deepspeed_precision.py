"""In 16 bits, a step applies what it says: the clipped norm, the scaled loss, nothing after an overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_core import Accelerator, GradScalerKwargs
from accel_deepspeed import DeepSpeedPlugin

pytestmark = pytest.mark.timeout(300)


def clipped_steps(stage: int) -> list[tuple[float, float]]:
    """(norm before clipping, how far the weights moved) of two steps of SGD, clipped to 0.5."""
    accelerator = Accelerator(
        device="cpu", mixed_precision="bf16", plugins=[DeepSpeedPlugin(zero_stage=stage)]
    )
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs, found = torch.linspace(-2, 2, 32).reshape(4, 8).to(torch.bfloat16), []
    for _ in range(2):
        before = {name: weight.clone() for name, weight in accelerator.iter_weights(model, torch.float32)}
        accelerator.backward((model(inputs).float() - 3).square().sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        after = dict(accelerator.iter_weights(model, torch.float32))
        moved = torch.stack([(after[name] - before[name]).square().sum() for name in before]).sum().sqrt()
        found.append((float(norm), float(moved)))
    accelerator.end_training()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default("2")
def test_a_step_moves_the_weights_by_the_norm_it_is_clipped_to(stage: int, run_processes) -> None:
    for steps in run_processes(clipped_steps, stage, world=2, timeout=200):
        for norm, moved in steps:
            assert norm > 5
            assert moved == pytest.approx(0.5, rel=0.02)


def halves(stage: int, scale: float, steps: int) -> tuple[list[tuple[float, float, bool]], list[float]]:
    """(loss, norm, skipped) of steps in float16, and the losses of float32.

    DeepSpeed asks whether the CPU has instructions for it; torch computes without them.
    """
    import deepspeed

    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True
    accelerator = Accelerator(
        device="cpu",
        mixed_precision="fp16",
        plugins=[DeepSpeedPlugin(zero_stage=stage)],
        kwargs_handlers=[GradScalerKwargs(init_scale=scale)],
    )
    plain, judge = network(0), network(1).requires_grad_(requires_grad=False)
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
    model: Any = network(0)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    judge = accelerator.prepare(judge)  # the loss begins at two outputs, one behind an engine that is frozen
    x, found, expected = torch.linspace(-2, 2, 32).reshape(4, 8), [], []
    for _ in range(steps):
        loss = judge(model(x.half())).float().square().mean() + (model(x.half() + 1).float() - 3).abs().mean()
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm, accelerator.optimizer_step_was_skipped))
        by_hand_loss = network(1)(plain(x)).square().mean() + (plain(x + 1) - 3).abs().mean()
        by_hand_loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        by_hand.step()
        by_hand.zero_grad()
        expected.append(by_hand_loss.item())
    accelerator.end_training()
    return found, expected


def network(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.by_default
def test_float16_trains_by_a_scaled_loss(stage: int, run_processes) -> None:
    for found, expected in run_processes(halves, stage, 1024.0, 4, world=2, timeout=200):
        assert [loss for loss, _, _ in found] == pytest.approx(expected, rel=1e-2)
        assert not any(skipped for *_, skipped in found)


def test_steps_that_overflow_are_skipped_until_the_scale_has_fallen(run_processes) -> None:
    for found, _ in run_processes(halves, 2, 2.0**22, 20, world=2, timeout=200):
        losses, norms, skipped = zip(*found, strict=True)
        first = skipped.index(False)
        assert first > 1
        assert set(losses[: first + 1]) == {losses[0]}
        assert norms[first - 1] == float("inf") != norms[first]
        assert not any(skipped[first:])


def steps_of_a_gan(stage: int) -> float:
    """How far float16's weights are from float32's."""
    import deepspeed

    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True
    ours = Accelerator(
        device="cpu",
        mixed_precision="fp16",
        plugins=[DeepSpeedPlugin(zero_stage=stage)],
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
    )
    plain = [network(0), network(1)]
    by_hand = [torch.optim.SGD(each.parameters(), lr=0.1) for each in plain]
    maker, critic = network(0), network(1)
    maker, first = ours.prepare(maker, torch.optim.SGD(maker.parameters(), lr=0.1))
    critic, second = ours.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    x = torch.linspace(-2, 2, 32).reshape(4, 8)
    for _ in range(3):
        ours.backward(critic(maker(x.half()).detach().half()).float().square().mean(), model=critic)
        plain[1](plain[0](x).detach()).square().mean().backward()
        second.step(), by_hand[1].step()
        second.zero_grad(), by_hand[1].zero_grad()
        critic.requires_grad_(requires_grad=False)
        ours.backward((critic(maker(x.half())).float() - 1).square().mean(), model=maker)
        critic.requires_grad_(requires_grad=True)
        (plain[1](plain[0](x)) - 1).square().mean().backward()
        first.step(), by_hand[0].step()
        first.zero_grad(), [each.zero_grad() for each in by_hand]
    strayed = 0.0
    for model, judge in zip((maker, critic), plain, strict=True):
        weights = dict(ours.iter_weights(model, torch.float32))
        strayed = max(
            strayed, *((weights[n] - w.detach()).abs().max().item() for n, w in judge.named_parameters())
        )
    ours.end_training()
    return strayed


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.by_default
def test_float16_trains_a_gan_whose_critic_is_frozen(stage: int, run_processes) -> None:
    assert max(run_processes(steps_of_a_gan, stage, world=2, timeout=200)) < 0.005


def steps_in_bfloat16(stage: int) -> tuple[list[float], list[float]]:
    """Losses of AdamW with a large decay, and those by hand with masters in float32."""
    accelerator = Accelerator(
        device="cpu", mixed_precision="bf16", plugins=[DeepSpeedPlugin(zero_stage=stage)]
    )
    plain, model = network(0).bfloat16(), network(0)
    masters = [nn.Parameter(weight.detach().float()) for weight in plain.parameters()]
    by_hand = torch.optim.AdamW(masters, lr=0.05, weight_decay=1.0)
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=1.0)
    )
    x, found, expected = torch.linspace(-2, 2, 32).reshape(4, 8).bfloat16(), [], []
    for _ in range(4):
        loss, by_hand_loss = ((each(x).float() - 3).square().mean() for each in (model, plain))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        by_hand_loss.backward()
        for master, weight in zip(masters, plain.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        by_hand.step()
        for master, weight in zip(masters, plain.parameters(), strict=True):
            weight.data.copy_(master)
        found.append(loss.item())
        expected.append(by_hand_loss.item())
    accelerator.end_training()
    return found, expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default
def test_in_bfloat16_adamw_decays_and_counts_from_its_first_step_on(stage: int, run_processes) -> None:
    """DeepSpeed begins stage 0 by a step of zeros."""
    ((found, expected),) = run_processes(steps_in_bfloat16, stage, world=1, timeout=200)
    assert found == pytest.approx(expected, rel=1e-5)
