"""LocalSGD trains as local SGD written in plain torch, bitwise, and leaves communication out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from local_sgd_problem import TIMEOUT, batches, flat, net, ours, plainly, with_optimizer
from torch import nn
from torch.nn import functional as F

from accel_core import (
    Accelerator,
    AccelError,
    ConfigError,
    DataLoaderConfiguration,
    GradScalerKwargs,
    LocalSGD,
)
from accel_core.distributed import collectives
from accel_testing import ProcessError

together = pytest.mark.needs("accel-ddp")


@together
@pytest.mark.parametrize(("every", "steps", "accumulate"), [(2, 4, 1), (3, 5, 1), (2, 3, 2)])
def test_it_equals_plain_local_sgd(every, steps, accumulate, run_processes):
    plain = run_processes(plainly, every, steps, accumulate)
    found = run_processes(ours, every, steps, accumulate)

    for (path, end), (our_path, our_end, *_) in zip(plain, found, strict=True):
        assert [torch.equal(a, b) for a, b in zip(path, our_path, strict=True)] == [True] * steps
        assert torch.equal(end, our_end)
    assert torch.equal(found[0][1], found[1][1])


@together
def test_no_gradient_is_reduced_and_weights_travel_once_an_average(run_processes):
    (first, _, *counts, _), (second, *_) = run_processes(ours, 2, 4, 2)

    assert counts == [0, 3]  # the end averages too
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [False, True, False, True]
    (first, *_), (second, *_) = run_processes(ours, 2, 5, 2)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [
        False,
        True,
        False,
        True,
        False,
    ]


@together
def test_gradients_are_shared_again_afterwards(run_processes):
    one, two = run_processes(ours, 2, 2, 1)

    assert torch.equal(one[-1], two[-1])


@together
@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_at_its_end_the_state_of_optimizers_is_averaged(kind, tmp_path, run_processes):
    one, two = run_processes(with_optimizer, kind, None, tmp_path / "checkpoint")

    (apart, means, kept, weights), (of_two, _, kept_of_two, weights_of_two) = one, two
    assert any(not torch.equal(a, b) for a, b in zip(apart, of_two, strict=True))
    for value, mean in zip(kept, means, strict=True):
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-9)
    assert [torch.equal(a, b) for a, b in zip(kept, kept_of_two, strict=True)] == [True] * len(means)
    assert torch.equal(weights, weights_of_two)
    assert (tmp_path / "checkpoint").is_dir()


class Coded(torch.optim.SGD):
    """Keeps codes of momentum with their scale, as optimizers of 8 bits do."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            momentum = parameter.grad.sign().to(torch.int8)
            self.state[parameter] = {"codes": momentum, "scale": parameter.grad.abs().mean()}
        return super().step(closure)


def warned(kind):
    with pytest.warns(UserWarning, match="LocalSGD of 'unit0': each rank keeps its optimizer's state"):
        return with_optimizer(kind, None)


@together
def test_state_that_is_not_of_floats_stays_each_ranks_own_with_a_warning(run_processes):
    (apart, _, kept, _), _ = run_processes(warned, partial(Coded, lr=0.1))

    assert [torch.equal(a, b) for a, b in zip(apart, kept, strict=True)] == [True] * len(apart)


@together
def test_disabled_it_is_plain_training(run_processes):
    one, two = run_processes(ours, 2, 3, 1, False)

    assert one[2] == 3
    assert [torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True)] == [True] * 3


SCALE = GradScalerKwargs(init_scale=1024.0)


def in_fp16(overflows):
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[TIMEOUT, SCALE])
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (unit,) = accelerator.run.units
    with LocalSGD(accelerator, model, 4) as local:
        for step in range(2):
            overflow = float("inf") if accelerator.process_index == 1 and step == overflows else 1.0
            accelerator.backward(model(torch.ones(2, 4)).sum() * overflow)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
        before = unit.scaler.get_scale()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    after = unit.scaler.get_scale()
    accelerator.end_training()
    return before, after


@together
@pytest.mark.parametrize("overflows", [0, 1])
def test_ranks_whose_loss_scales_differ_go_on_with_the_smallest(overflows, run_processes):
    """Also where the last step has overflowed on one of them."""
    assert run_processes(in_fp16, overflows) == [(1024.0, 512.0), (512.0, 512.0)]


def grown_in_fp16():
    scale = GradScalerKwargs(init_scale=1024.0, growth_interval=5)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[TIMEOUT, scale])
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (unit,) = accelerator.run.units

    def step(overflow):
        accelerator.backward(model(torch.ones(2, 4)).sum() * overflow)
        optimizer.step()
        optimizer.zero_grad()

    with LocalSGD(accelerator, model, 2) as local:
        for number in range(4):
            step(float("inf") if accelerator.process_index == 1 and number == 1 else 1.0)
            local.step()
    scales = []
    for _ in range(5):
        step(1.0)
        scales.append(unit.scaler.get_scale())
    accelerator.end_training()
    return scales


@together
def test_loss_scales_grow_together_afterwards(run_processes):
    one, two = run_processes(grown_in_fp16)

    assert one == two


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return (self.first + self.second) * x


def at_two_rates_in_fp16():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[TIMEOUT, SCALE])
    model = Sum()
    model, each, every_third = accelerator.prepare(
        model, torch.optim.SGD([model.first], lr=1.0), torch.optim.SGD([model.second], lr=1.0)
    )
    with LocalSGD(accelerator, model, 2) as local:
        for step in range(3):
            overflow = float("inf") if accelerator.process_index == 1 and step == 0 else 1.0
            accelerator.backward(model(torch.ones(1)).sum() * overflow)
            each.step()
            each.zero_grad()
            if step == 2:
                every_third.step()
                stepped = accelerator.unwrap_model(model).second.item()
            local.step()
    accelerator.end_training()
    return stepped


@together
def test_a_gradient_that_waits_for_its_step_follows_the_smallest_loss_scale(run_processes):
    assert run_processes(at_two_rates_in_fp16) == [-3.0, 0.0]


def raises_inside():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TIMEOUT])
    model = net()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with LocalSGD(accelerator, model, 2) as local:
        local.step()
        if accelerator.process_index == 1:
            raise ZeroDivisionError("inside")
    accelerator.end_training()


@together
def test_a_rank_that_raises_inside_does_not_wait_for_an_average(run_processes):
    with pytest.raises(ProcessError, match="ZeroDivisionError: inside") as caught:
        run_processes(raises_inside)
    assert caught.value.rank == 1


def left_before_the_count():
    """Weights after a context that is left between a step and its count, and one step outside."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TIMEOUT])
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with LocalSGD(accelerator, model, 2) as local:
        for number, (x, y) in enumerate(batches(3, accelerator.process_index)):
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if number == 2:
                break
            local.step()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    found = flat(model)
    accelerator.end_training()
    return found


@together
def test_its_end_averages_a_step_that_is_not_counted(run_processes):
    one, two = run_processes(left_before_the_count)

    assert torch.equal(one, two)


def test_in_one_process_it_does_nothing():
    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with LocalSGD(accelerator, model, 1) as local:
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        stepped = [parameter.clone() for parameter in model.parameters()]
        local.step()
    assert all(map(torch.equal, stepped, model.parameters()))
    accelerator.end_training()


def test_a_model_that_is_not_prepared_is_an_error():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AccelError, match="has not prepared the"):
        LocalSGD(accelerator, net(), 2)
    accelerator.end_training()


def refused():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TIMEOUT])
    model = accelerator.prepare(net())
    cards = accelerator.run._assembly.cards
    cards["ddp"] = cards["ddp"]._replace(offers=cards["ddp"].offers - {"local_sgd"})
    try:
        LocalSGD(accelerator, model, 2)
    except ConfigError as error:
        return str(error)
    finally:
        accelerator.end_training()


def counts_items():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TIMEOUT])
    model = accelerator.prepare(net())
    with LocalSGD(accelerator, model, 2), pytest.raises(AccelError) as told:
        next(accelerator.windows(batches(2, 0), model, items=len))
    accelerator.end_training()
    return str(told.value)


@together
def test_items_of_all_ranks_are_refused_where_ranks_keep_their_gradients(run_processes):
    for told in run_processes(counts_items):
        assert told.startswith("windows(items=...) inside LocalSGD or no_sync:")


def refused_for_uneven_batches():
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TIMEOUT], dataloader_config=config)
    try:
        LocalSGD(accelerator, accelerator.prepare(net()), 2)
    except ConfigError as error:
        return str(error)
    finally:
        accelerator.end_training()


@together
def test_ranks_that_may_have_fewer_steps_are_refused(run_processes):
    for found in run_processes(refused_for_uneven_batches):
        assert "set data.even_batches: true" in found


@together
def test_a_strategy_that_cannot_is_refused_at_once(run_processes):
    for found in run_processes(refused):
        assert "ranks cannot step by themselves under strategy 'ddp'" in found
        assert "choose a strategy that can: ddp" in found


class Doubles:
    """Stands for a group: its mean is twice what this rank has."""

    def __init__(self):
        self.sizes = []

    def all_reduce(self, tensor, operation):
        self.sizes.append(tensor.numel())
        return tensor * 2


def test_weights_are_averaged_in_buckets(monkeypatch):
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 40)
    weights = [torch.nn.Parameter(torch.full((count,), float(count))) for count in (4, 3, 4, 2)]
    group = Doubles()
    collectives.average(weights, group)
    assert group.sizes == [11, 2]
    assert [weight[0].item() for weight in weights] == [8.0, 6.0, 8.0, 4.0]


def test_averaging_every_zero_steps_is_refused():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="local_sgd_steps must be at least 1, got 0"):
        LocalSGD(accelerator, model, local_sgd_steps=0)
