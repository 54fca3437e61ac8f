"""Gradients that wait for a step while the loss scale changes: judged by the loop in float32."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.optim import SGD
from training_problems import FEATURES

from accel_core import AccelError, GradScalerKwargs

LR = 0.05


def parts():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, 8), nn.Linear(8, 1)


def batch_of(number):
    made = torch.Generator().manual_seed(number)
    return torch.randn(16, FEATURES, generator=made), torch.randn(16, 1, generator=made)


def train(parts, model, optimizers, rates, *, backward, clip):
    """Step each optimizer at its own rate, and clip its gradients before."""
    for number in range(8):
        x, y = batch_of(number)
        backward((model(x).float() - y).square().mean())
        for part, optimizer, rate in zip(parts, optimizers, rates, strict=True):
            if number % rate == rate - 1:
                clip(part.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach().clone() for part in parts for parameter in part.parameters()]


def plain(rates, clip=nn.utils.clip_grad_norm_):
    made = parts()
    optimizers = [SGD(each.parameters(), lr=LR) for each in made]
    return train(made, nn.Sequential(*made), optimizers, rates, backward=torch.Tensor.backward, clip=clip)


def scaled(accelerator_of, growth_interval=1):
    scaler = GradScalerKwargs(init_scale=16.0, growth_interval=growth_interval)
    return accelerator_of(mixed_precision="fp16", kwargs_handlers=[scaler])


def assert_alike(ours, plain):
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=0.04 * LR)


def no_clip(parameters, max_norm):
    return None


@pytest.mark.parametrize("growth_interval", [1, 2, 1000])
@pytest.mark.parametrize("rates", [(1, 2), (2, 1), (2, 3), (1, 1)])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("units", [1, 2])
def test_optimizers_of_one_loss_may_step_at_different_rates(
    accelerator_of, growth_interval, rates, clips, units
):
    accelerator, made = scaled(accelerator_of, growth_interval), parts()
    optimizers = [SGD(each.parameters(), lr=LR) for each in made]
    if units == 1:
        model, *optimizers = accelerator.prepare(nn.Sequential(*made), *optimizers)
    else:
        made = [accelerator.prepare(each) for each in made]
        optimizers = [accelerator.prepare(each) for each in optimizers]
        model = nn.Sequential(*made)
    clip = accelerator.clip_grad_norm_ if clips else no_clip
    ours = train(made, model, optimizers, rates, backward=accelerator.backward, clip=clip)
    assert len(accelerator.run.units) == units
    assert_alike(ours, plain(rates, nn.utils.clip_grad_norm_ if clips else no_clip))


def test_a_backward_adds_to_gradients_that_were_not_cleared_after_a_step(accelerator_of):
    accelerator = scaled(accelerator_of)
    model, reference = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    reference.load_state_dict(model.state_dict())
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=LR))
    by_hand = SGD(reference.parameters(), lr=LR)
    for number in range(1, 5):
        accelerator.backward(model(torch.full((1, 1), float(number))).sum())
        optimizer.step()
        reference(torch.full((1, 1), float(number))).sum().backward()
        by_hand.step()
    assert_alike(model.parameters(), reference.parameters())


def test_what_one_optimizer_overflows_with_does_not_hold_up_another(accelerator_of):
    """The second never steps, and its gradients are never cleared."""
    accelerator, made = scaled(accelerator_of), parts()
    made = [accelerator.prepare(each) for each in made]
    first, _ = (accelerator.prepare(SGD(each.parameters(), lr=LR)) for each in made)
    scaler = accelerator.run.units[0].scaler
    found = []
    for number in range(4):
        x, y = batch_of(number)
        loss = (made[1](made[0](x)).float() - y).square().mean()
        accelerator.backward(loss * float("inf") if number < 2 else loss)
        first.step()
        first.zero_grad()
        found.append((first.step_was_skipped, scaler.get_scale()))
    assert found == [(True, 16.0), (True, 8.0), (False, 4.0), (False, 8.0)]


def test_a_state_may_be_loaded_after_a_step_of_one_optimizer_of_two(accelerator_of, tmp_path):
    accelerator, made = scaled(accelerator_of), parts()
    made = [accelerator.prepare(each) for each in made]
    optimizers = [accelerator.prepare(SGD(each.parameters(), lr=LR)) for each in made]

    def backward(number):
        x, y = batch_of(number)
        accelerator.backward((made[1](made[0](x)).float() - y).square().mean())

    accelerator.save_state(tmp_path / "saved")
    backward(0)
    optimizers[0].step()
    accelerator.load_state(tmp_path / "saved")
    for each in optimizers:
        each.zero_grad()
    ours = train(
        made,
        nn.Sequential(*made),
        optimizers,
        (1, 1),
        backward=accelerator.backward,
        clip=accelerator.clip_grad_norm_,
    )
    assert_alike(ours, plain((1, 1)))


def test_a_step_that_fails_after_its_gradients_were_divided_may_be_done_again(accelerator_of):
    class Failing(SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                self.fails = False
                raise KeyboardInterrupt
            super().step(closure)

    accelerator, made = scaled(accelerator_of), parts()
    model, *optimizers = accelerator.prepare(
        nn.Sequential(*made), *(Failing(each.parameters(), lr=LR) for each in made)
    )
    x, y = batch_of(0)
    accelerator.backward((model(x).float() - y).square().mean())
    for each in optimizers:
        with suppress(KeyboardInterrupt):
            each.step()
        each.step()
    reference = parts()
    (nn.Sequential(*reference)(x) - y).square().mean().backward()
    for each in reference:
        SGD(each.parameters(), lr=LR).step()
    expected = [parameter for each in reference for parameter in each.parameters()]
    assert_alike([parameter for each in made for parameter in each.parameters()], expected)


def test_an_optimizer_without_gradients_steps_nothing_and_holds_up_no_other(accelerator_of):
    """Each part trains alone, and both are clipped and stepped each time."""

    def run(made, optimizers, backward, clip):
        for number in range(4):
            part = made[number % 2]
            backward(part(torch.ones(1, part.in_features)).float().sum())
            for each, optimizer in zip(made, optimizers, strict=True):
                clip(each.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return [parameter for each in made for parameter in each.parameters()]

    accelerator, made, expected = scaled(accelerator_of), parts(), parts()
    _, *optimizers = accelerator.prepare(
        nn.Sequential(*made), *(SGD(each.parameters(), lr=LR, momentum=0.9) for each in made)
    )
    ours = run(made, optimizers, accelerator.backward, accelerator.clip_grad_norm_)
    by_hand = [SGD(each.parameters(), lr=LR, momentum=0.9) for each in expected]
    assert_alike(ours, run(expected, by_hand, torch.Tensor.backward, nn.utils.clip_grad_norm_))


@pytest.mark.parametrize("cleared", [True, False])
def test_gradients_that_were_clipped_before_units_share_a_loss_count_in_its_step(accelerator_of, cleared):
    """The units have one scale from then on."""

    def run(made, optimizers, backward, clip, options):
        backward(made[1](torch.ones(1, 8)).float().sum(), **options)
        clip(made[1].parameters(), 0.5)
        if cleared:
            optimizers[1].zero_grad()
        backward(made[1](made[0](torch.ones(1, FEATURES))).float().sum())
        norms = [clip(each.parameters(), 100.0) for each in made]
        for optimizer in optimizers:
            optimizer.step()
        return [*norms, *(parameter for each in made for parameter in each.parameters())]

    made, expected = [*parts()], parts()
    accelerator = scaled(accelerator_of)
    optimizers = [SGD(each.parameters(), lr=LR) for each in made]
    for number in range(2):
        made[number], optimizers[number] = accelerator.prepare(made[number], optimizers[number])
    ours = run(made, optimizers, accelerator.backward, accelerator.clip_grad_norm_, {"model": made[1]})
    by_hand = [SGD(each.parameters(), lr=LR) for each in expected]
    plain = run(expected, by_hand, torch.Tensor.backward, nn.utils.clip_grad_norm_, {})
    torch.testing.assert_close(ours[:2], plain[:2], rtol=0.01, atol=0.0)
    assert_alike(ours[2:], plain[2:])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_a_loss_that_names_another_model_may_be_cleared(accelerator_of, set_to_none):
    def run(made, optimizers, backward, named):
        generator, critic = made
        for _ in range(3):
            optimizers[1].zero_grad(set_to_none)
            backward(critic(generator(torch.ones(1, FEATURES)).detach()).float().sum(), **named(critic))
            optimizers[1].step()
            optimizers[0].zero_grad(set_to_none)
            backward(critic(generator(torch.ones(1, FEATURES))).float().sum(), **named(generator))
            optimizers[0].step()
        return [parameter for each in made for parameter in each.parameters()]

    accelerator, made, expected = scaled(accelerator_of, 2), [*parts()], parts()
    optimizers = [SGD(each.parameters(), lr=LR) for each in made]
    for number in range(2):
        made[number], optimizers[number] = accelerator.prepare(made[number], optimizers[number])
    ours = run(made, optimizers, accelerator.backward, lambda model: {"model": model})
    by_hand = [SGD(each.parameters(), lr=LR) for each in expected]
    assert_alike(ours, run(expected, by_hand, torch.Tensor.backward, lambda model: {}))


def test_what_is_clipped_apart_from_gradients_that_overflowed_is_stepped(accelerator_of):
    accelerator, made = scaled(accelerator_of), parts()
    model, *optimizers = accelerator.prepare(
        nn.Sequential(*made), *(SGD(each.parameters(), lr=LR) for each in made)
    )
    accelerator.backward(model(torch.ones(1, FEATURES)).float().sum())
    made[0].bias.grad[0] = float("inf")
    for each in made:
        accelerator.clip_grad_norm_(each.parameters(), 0.5)
    for each in optimizers:
        each.step()
    assert [each.step_was_skipped for each in optimizers] == [True, False]


def test_a_step_without_gradients_does_nothing_at_any_time(accelerator_of):
    accelerator, model = scaled(accelerator_of), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=LR))
    before = model.weight.detach().clone()
    accelerator.unscale_gradients()
    optimizer.step()  # before the first loss
    assert torch.equal(model.weight, before)
    accelerator.backward(model(torch.ones(1, 2)).float().sum())
    optimizer.step()
    optimizer.zero_grad()
    after = model.weight.detach().clone()
    optimizer.step()  # after another
    optimizer.step()
    assert torch.equal(model.weight, after)
    accelerator.backward(model(torch.ones(1, 2)).float().sum())
    optimizer.step()
    torch.testing.assert_close(model.weight, after - (before - after), rtol=0.0, atol=0.01 * LR)


def test_sparse_gradients_that_wait_follow_the_scale(accelerator_of):
    accelerator = scaled(accelerator_of)
    model = nn.ModuleList([nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1)])
    model, waits, steps = accelerator.prepare(model, *(SGD(each.parameters(), lr=LR) for each in model))
    before = model[0].weight.detach().clone()
    for _ in range(2):
        accelerator.backward(model[0](torch.tensor([1, 1])).sum() + model[1](torch.ones(1, 2)).float().sum())
        steps.step()  # and the scale grows
        steps.zero_grad()
    waits.step()
    moved = torch.tensor([[0.0, 0.0], [4 * LR, 4 * LR], [0.0, 0.0]])
    torch.testing.assert_close(before - model[0].weight, moved, rtol=0.0, atol=0.01 * LR)


def test_the_runs_scaler_unscales_no_optimizer_behind_its_back(accelerator_of):
    accelerator = accelerator_of(mixed_precision="fp16")
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=LR))
    accelerator.backward(model(torch.ones(1, 2)).sum())

    with pytest.raises(AccelError, match=r"unscale a SGD.*\n.*unscale_gradients\(optimizer\)"):
        accelerator.run.units[0].scaler.unscale_(optimizer.optimizer)
