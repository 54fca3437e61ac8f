"""A unit knows whether it holds gradients that no optimizer has applied: they are in no checkpoint."""

from __future__ import annotations

import pytest
from torch.optim import SGD
from training_problems import batches, net

from accel_core import GradScalerKwargs

X = batches(1)[0][0]


def prepared(accelerator, optimizers=1):
    model = net()
    made = [SGD(model[2 * number].parameters(), lr=0.1) for number in range(optimizers)]
    model, *made = accelerator.prepare(model, *made)
    return accelerator.run.units[0], model, made


def test_gradients_are_pending_from_the_backward_to_the_step(accelerator):
    unit, model, (optimizer,) = prepared(accelerator)
    seen = [unit.pending]
    loss = model(X).sum()
    seen.append(unit.pending)
    accelerator.backward(loss)
    seen.append(unit.pending)
    optimizer.step()
    assert [*seen, unit.pending] == [False, False, True, False]


def test_gradients_are_pending_inside_a_window_whatever_is_called(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    unit, model, (optimizer,) = prepared(accelerator)
    seen = []
    for _ in range(4):
        with accelerator.accumulate(model):
            seen.append(unit.pending)
            accelerator.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(unit.pending)
    assert seen == [False, True, True, False] * 2


def test_dropped_gradients_are_not_pending(accelerator):
    unit, model, (optimizer,) = prepared(accelerator)
    accelerator.backward(model(X).sum())
    optimizer.zero_grad()
    assert not unit.pending


def test_each_of_several_optimizers_must_have_stepped(accelerator):
    unit, model, optimizers = prepared(accelerator, optimizers=2)
    accelerator.backward(model(X).sum())
    seen = []
    for optimizer in optimizers:
        seen.append(unit.pending)
        optimizer.step()
    assert [*seen, unit.pending] == [True, True, False]


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_that_the_model_dropped_are_not_pending(accelerator, tmp_path, inside):
    unit, model, _ = prepared(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(X).sum())
        if inside:
            model.zero_grad()
    assert unit.pending != inside
    model.zero_grad()
    assert not unit.pending
    accelerator.save_state(tmp_path / "saved")


def test_a_skipped_step_leaves_nothing_pending(accelerator_of):
    accelerator = accelerator_of(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0)])
    unit, model, (optimizer,) = prepared(accelerator)
    accelerator.backward(model(X).float().sum() * float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert not unit.pending


def test_whole_windows_leave_gradients_pending_until_the_step(accelerator):
    unit, model, (optimizer,) = prepared(accelerator)
    accelerator.forward_backward(model, [X, X], lambda model, x: (model(x).sum(), None), microbatches=2)
    assert unit.pending
    optimizer.step()
    assert not unit.pending


@pytest.mark.parametrize("accumulating", [False, True])
def test_adversaries_that_name_no_model_have_nothing_pending_once_both_stepped(accelerator, accumulating):
    first, second = net(0), net(1)
    first, second, one, two = accelerator.prepare(
        first, second, SGD(first.parameters(), lr=0.1), SGD(second.parameters(), lr=0.1)
    )
    for model, optimizer in ((first, one), (second, two)):
        if accumulating:
            with accelerator.accumulate():
                accelerator.backward(model(X).sum())
                optimizer.step()
        else:
            accelerator.backward(model(X).sum())
            optimizer.step()
    assert [unit.pending for unit in accelerator.run.units] == [False, False]
