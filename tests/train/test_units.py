"""Several units in one run: adversaries, teacher and student, optimizers that share a loss."""

from __future__ import annotations

import pytest
import torch
import training_problems
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from training_problems import FEATURES, net

from accel_core import Accelerator, AccelError, GradScalerKwargs


def adversaries():
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, FEATURES))
    critic = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    return generator, critic, SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)


def real_and_noise(count):
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(8, FEATURES, generator=generator), torch.randn(8, 4, generator=generator))
        for _ in range(count)
    ]


def critic_loss(critic, real, fake):
    return F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()


def plain_gan(count, accumulate):
    generator, critic, opt_g, opt_d = adversaries()
    losses = []
    for number, (real, noise) in enumerate(real_and_noise(count), 1):
        loss_d = critic_loss(critic, real, generator(noise))
        (loss_d / accumulate).backward()
        if number % accumulate == 0:
            opt_d.step()
            opt_d.zero_grad()
        critic.requires_grad_(False)
        loss_g = F.softplus(-critic(generator(noise))).mean()
        (loss_g / accumulate).backward()
        critic.requires_grad_(True)
        if number % accumulate == 0:
            opt_g.step()
            opt_g.zero_grad()
        losses.append((loss_d.item(), loss_g.item()))
    return losses


def our_gan(accelerator, count):
    generator, critic, opt_g, opt_d = accelerator.prepare(*adversaries())
    inner = accelerator.unwrap_model(critic)
    losses = []
    for real, noise in real_and_noise(count):
        with accelerator.accumulate(critic):
            loss_d = critic_loss(critic, real, generator(noise))
            accelerator.backward(loss_d)
            opt_d.step()
            opt_d.zero_grad()
        with accelerator.accumulate(generator):
            inner.requires_grad_(False)
            loss_g = F.softplus(-inner(generator(noise))).mean()
            accelerator.backward(loss_g)
            inner.requires_grad_(True)
            opt_g.step()
            opt_g.zero_grad()
        losses.append((loss_d.item(), loss_g.item()))
    return losses


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_a_gan_equals_the_plain_loop(accelerator_of, accumulate):
    ours = our_gan(accelerator_of(gradient_accumulation_steps=accumulate), 12)
    assert ours == plain_gan(12, accumulate)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_gan_in_fp16_equals_the_plain_loop_though_its_units_share_a_loss_scale(accelerator_of, accumulate):
    # Growing at each step: a scale that changed inside the other's window would show at once.
    scaler = GradScalerKwargs(init_scale=1.0, growth_interval=1)
    accelerator = accelerator_of(
        mixed_precision="fp16", gradient_accumulation_steps=accumulate, kwargs_handlers=[scaler]
    )
    for ours, plain in zip(our_gan(accelerator, 4), plain_gan(4, accumulate), strict=True):
        assert ours == pytest.approx(plain, abs=2e-2)
    first, second = accelerator.run.units
    assert first.scaler is second.scaler


def test_two_optimizers_that_share_a_loss_share_its_scale(accelerator_of):
    accelerator = accelerator_of(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(growth_interval=1)]
    )
    a, b = net(0), net(1)
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(0))
    a, b, opt_a, opt_b = accelerator.prepare(a, b, SGD(a.parameters(), lr=0.0), SGD(b.parameters(), lr=0.0))
    seen = []
    for _ in range(3):
        accelerator.backward((a(x) + b(x)).float().mean())
        accelerator.unscale_gradients()
        seen.append([next(m.parameters()).grad.clone() for m in (a, b)])
        opt_a.step()
        opt_b.step()
        opt_a.zero_grad()
        opt_b.zero_grad()
    for gradients in seen[1:]:
        for gradient, first in zip(gradients, seen[0], strict=True):
            torch.testing.assert_close(gradient, first)


def test_a_teacher_without_optimizer_is_a_unit_that_does_not_train(accelerator):
    teacher, student = net(0), net(1)
    optimizer = SGD(student.parameters(), lr=0.1)
    teacher = accelerator.prepare(teacher.requires_grad_(False), name="teacher")
    student, optimizer = accelerator.prepare(student, optimizer, name="student")
    x = torch.randn(8, FEATURES)
    before = [p.clone() for p in teacher.parameters()]
    accelerator.backward(F.mse_loss(student(x), teacher(x)))
    optimizer.step()
    assert [unit.name for unit in accelerator.run.prepared.trained] == ["student"]
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))


OWNS_BACKWARD = """
from accel_core import Card, hooks, implements

class Plugin:
    def __init__(self, config, run):
        self.below = None

    @implements(hooks.backward)
    def backward(self, unit, loss, boundary, options):
        loss.backward(**options)

CARD = Card(name="owns", slot="strategy", summary="A toy.", api_version="1.0",
            implementation="toy_owns:Plugin")
"""


def test_a_teacher_within_accumulate_leaves_backward_to_the_students_strategy(toy_plugin):
    toy_plugin("owns", "strategy", source=OWNS_BACKWARD)
    accelerator = Accelerator(cpu=True, strategy="owns")
    teacher, student = net(0).requires_grad_(False), net(1)
    teacher, student, _ = accelerator.prepare(teacher, student, SGD(student.parameters(), lr=0.1))
    x = torch.randn(8, FEATURES)
    with accelerator.accumulate(teacher, student):
        accelerator.backward(F.mse_loss(student(x), teacher(x)))
    assert all(parameter.grad is not None for parameter in student.parameters())
    accelerator.end_training()


def test_a_loss_of_two_strategies_is_left_to_the_one_that_does_its_own_backward(toy_plugin):
    toy_plugin("owns", "strategy", source=OWNS_BACKWARD)
    accelerator = Accelerator(cpu=True, strategy="owns")
    a, b = net(0), net(1)
    a, _ = accelerator.prepare(a, SGD(a.parameters(), lr=0.1))
    b, _ = accelerator.prepare(b, SGD(b.parameters(), lr=0.1), strategy="single")
    calls = []
    owner = accelerator.run.prepared.unit_of_model(a)
    own = owner.steps.backward
    owner.steps.backward = lambda *args: (calls.append(args[0]), own(*args))
    x = torch.randn(8, FEATURES)
    accelerator.backward((a(x) + b(x)).mean())
    assert calls == [owner]
    assert all(parameter.grad is not None for model in (a, b) for parameter in model.parameters())
    accelerator.end_training()


def test_clipping_parameters_of_two_units_at_once_names_them(accelerator):
    a, b = net(0), net(1)
    accelerator.prepare(a, SGD(a.parameters(), lr=0.1), name="first")
    accelerator.prepare(b, SGD(b.parameters(), lr=0.1), name="second")
    with pytest.raises(AccelError, match="belong to first, second; one call clips"):
        accelerator.clip_grad_norm_([*a.parameters(), *b.parameters()], 1.0)


REDUCES = """
from accel_core import Card, hooks, implements

class Plugin:
    def __init__(self, config, run):
        self.below, self.times = None, 0

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit):
        self.times += 1

CARD = Card(name="reduces", slot="strategy", summary="A toy.", api_version="1.0",
            implementation="toy_reduces:Plugin", offers={"several_optimizers"})
"""


def two_halves(toy_plugin):
    """A model with an optimizer for each half, under a strategy that counts its reductions."""
    toy_plugin("reduces", "strategy", source=REDUCES)
    accelerator = Accelerator(cpu=True, strategy="reduces")
    model = net()
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    model, *optimizers = accelerator.prepare(model, *(SGD(half, lr=0.1) for half in halves))
    return accelerator, model, optimizers, accelerator.run.units[0].plugin


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_are_reduced_once_a_window(toy_plugin, clipped):
    accelerator, model, optimizers, plugin = two_halves(toy_plugin)
    for window in range(1, 4):
        accelerator.backward(model(torch.ones(2, FEATURES)).sum())
        if clipped:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert plugin.times == window
    accelerator.end_training()


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_that_came_since_an_optimizer_was_left_out_are_reduced(toy_plugin, clipped):
    accelerator, model, (first, second), plugin = two_halves(toy_plugin)
    for window, steps in enumerate([first, second, first, second], start=1):  # each leaves out the other
        accelerator.backward(model(torch.ones(2, FEATURES)).sum())
        if clipped:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        assert plugin.times == window
    accelerator.end_training()


def test_those_of_a_losss_own_backward_are_reduced_by_each_call_also_after_a_batch_that_was_dropped(
    toy_plugin,
):
    """Core does not see that backward, nor the model's own zero_grad; an average of averages is the same."""
    accelerator, model, optimizers, plugin = two_halves(toy_plugin)
    for is_bad in (True, False, False):
        before = plugin.times
        model(torch.ones(2, FEATURES)).sum().backward()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert plugin.times == before + 1
        if is_bad:
            model.zero_grad()
            continue
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert plugin.times == before + 3
    accelerator.end_training()


@pytest.mark.needs("accel-ddp")
def test_a_strategy_of_whole_parameters_refuses_a_sharded_model_by_name(run_processes):
    for said in run_processes(training_problems.prepare_in_parts, world=2):
        assert "is a DTensor" in said
        assert "strategy 'ddp' trains whole parameters" in said
