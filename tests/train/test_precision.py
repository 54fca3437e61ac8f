"""fp16's scaler: what it skips, when it grows, what it refuses; and how forwards come under autocast."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import pickle
import threading
import weakref
from types import MethodType
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR
from training_problems import FEATURES, net

from accel_core import (
    AccelError,
    AutocastKwargs,
    ConfigError,
    GradScalerKwargs,
    get_grad_scaler,
    get_mixed_precision_context_manager,
)

X = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(0))


def test_a_loss_that_was_not_scaled_is_torchs_error(accelerator_of):
    accelerator = accelerator_of(mixed_precision="fp16")
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), 0.1))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="_scale is None"):
        optimizer.step()


def fp16(accelerator_of, **options):
    return accelerator_of(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**options)])


def test_an_overflow_skips_the_step_and_the_scheduler_and_is_visible(accelerator_of):
    accelerator = fp16(accelerator_of, init_scale=16.0)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, StepLR(optimizer, 1, gamma=0.5))
    before = [p.clone() for p in model.parameters()]
    accelerator.backward(model(X).float().sum() * float("inf"))
    optimizer.step()
    scheduler.step()
    assert accelerator.optimizer_step_was_skipped
    assert optimizer.step_was_skipped
    assert scheduler.get_last_lr() == [0.1]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    accelerator.backward(model(X).float().sum())
    optimizer.step()
    scheduler.step()
    assert not accelerator.optimizer_step_was_skipped
    assert accelerator.run.units[0].scaler.get_scale() == 8.0
    assert scheduler.get_last_lr() == [0.05]


def scales_of(model, scaler, step, steps=9):
    """Scales after each step, of gradients that overflow in every fourth."""
    found = []
    for number in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(X).float().mean()
        step(loss * float("inf") if number % 4 == 1 else loss)
        found.append(scaler.get_scale())
    return found


def test_after_each_step_the_scale_is_that_of_torchs_own_loop(accelerator_of):
    options = {"init_scale": 64.0, "growth_interval": 2}
    accelerator, plain = fp16(accelerator_of, **options), net()
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    by_hand, scaler = SGD(plain.parameters(), lr=0.1), torch.amp.GradScaler("cpu", **options)

    def step(loss):
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def plain_step(loss):
        scaler.scale(loss).backward()
        scaler.step(by_hand)
        scaler.update()
        by_hand.zero_grad()

    wanted = scales_of(plain, scaler, plain_step)
    assert {*wanted} == {32.0, 64.0}
    assert scales_of(model, accelerator.run.units[0].scaler, step) == wanted


class Failing(SGD):
    """An optimizer whose next step raises, if told so."""

    error: type[BaseException] | None = None

    def step(self, closure=None):
        error, self.error = self.error, None
        if error is not None:
            raise error
        super().step(closure)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_no_gradients_counted_as_unscaled(accelerator_of, error):
    """The next step applied gradients that were still scaled."""
    accelerator, plain = fp16(accelerator_of, init_scale=1024.0), net()
    model = net()
    model, optimizer = accelerator.prepare(model, Failing(model.parameters(), lr=0.1))
    by_hand = SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        accelerator.backward(model(X).float().mean())
        optimizer.optimizer.error = error if number == 1 else None
        with pytest.raises(error) if number == 1 else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = plain(X).float().mean()
        loss.backward()
        if number != 1:
            by_hand.step()
        by_hand.zero_grad()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("between", ["clip_grad_norm_", "unscale_gradients"])
def test_gradients_of_a_step_are_not_unscaled_again_after_it(accelerator_of, between):
    accelerator = fp16(accelerator_of, init_scale=64.0, growth_interval=4)
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    scales = []
    for _ in range(5):
        accelerator.backward(model(X).float().mean())
        optimizer.step()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        if between == "clip_grad_norm_":
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            torch.testing.assert_close(norm, torch.cat([each.flatten() for each in before]).norm())
        else:
            accelerator.unscale_gradients()
        for parameter, expected in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad, expected)
        optimizer.zero_grad()
        scales.append(accelerator.run.units[0].scaler.get_scale())
    assert scales == [64.0, 64.0, 64.0, 128.0, 128.0]


@pytest.mark.parametrize("windows", [False, True])
def test_a_model_without_a_prepared_optimizer_gets_gradients_that_are_not_scaled(accelerator_of, windows):
    """Nothing unscales them. In a window they were scaled."""
    accelerator, plain = fp16(accelerator_of, init_scale=1024.0), net()
    model = accelerator.prepare(net())
    with accelerator.accumulate(model) if windows else contextlib.nullcontext():
        accelerator.backward(model(X).float().mean())
    with torch.autocast("cpu", dtype=torch.float16):
        loss = plain(X).float().mean()
    loss.backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_gradients_unscaled_and_dropped_do_not_disturb_the_next_step(accelerator_of):
    accelerator = fp16(accelerator_of, init_scale=1024.0)
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(X).float().sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    accelerator.backward(model(X).float().mean())
    accelerator.unscale_gradients(optimizer)
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(X).float().mean().backward()
    for gradient, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("listed", [False, True])
def test_gradients_are_unscaled_by_the_optimizer_that_prepare_was_given_too(accelerator_of, listed):
    accelerator = fp16(accelerator_of, init_scale=1024.0)
    model = net()
    plain = SGD(model.parameters(), lr=0.1)
    model, _ = accelerator.prepare(model, plain)
    accelerator.backward(model(X).float().mean())
    scaled = [p.grad.clone() for p in model.parameters()]
    accelerator.unscale_gradients([plain] if listed else plain)
    for gradient, parameter in zip(scaled, model.parameters(), strict=True):
        torch.testing.assert_close(gradient / 1024.0, parameter.grad)


def test_only_gradients_of_the_named_optimizers_unit_are_unscaled(accelerator_of):
    accelerator = fp16(accelerator_of, init_scale=1024.0)
    (one, first), (other, _) = (
        accelerator.prepare(model, SGD(model.parameters(), lr=0.1)) for model in (net(), net())
    )
    for model in (one, other):
        accelerator.backward(model(X).float().mean(), model=model)
    accelerator.unscale_gradients(first)
    for unscaled, scaled in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(unscaled.grad, scaled.grad / 1024.0)


def test_gradients_of_an_optimizer_that_was_not_prepared_are_not_unscaled(accelerator_of):
    accelerator = fp16(accelerator_of)
    model = net()
    accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    for optimizer in (SGD(net().parameters(), lr=0.1), "adam", [None]):
        with pytest.raises(AccelError, match="unscale_gradients: this run has not prepared"):
            accelerator.unscale_gradients(optimizer)


def test_each_optimizer_may_be_clipped_just_before_it_steps(accelerator_of):
    accelerator = fp16(accelerator_of, init_scale=1024.0)
    model = net()
    model, *optimizers = accelerator.prepare(model, *(SGD(model[at].parameters(), lr=0.1) for at in (0, 2)))
    reference = net()
    plain = [SGD(reference[at].parameters(), lr=0.1) for at in (0, 2)]
    for _ in range(3):
        accelerator.backward(model(X).float().square().sum())
        with torch.autocast("cpu", dtype=torch.float16):
            output = reference(X)
        output.float().square().sum().backward()
        for at, optimizer, other in zip((0, 2), optimizers, plain, strict=True):
            accelerator.clip_grad_norm_(model[at].parameters(), 0.1)
            nn.utils.clip_grad_norm_(reference[at].parameters(), 0.1)
            optimizer.step()
            other.step()
        for each in (*optimizers, *plain):
            each.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_float16_parameters_are_refused_by_name(accelerator_of):
    accelerator = accelerator_of(mixed_precision="fp16")
    with pytest.raises(ConfigError, match=r"0\.weight is float16 \(4 such.*\n.*model.float\(\)"):
        accelerator.prepare(net().half())


@pytest.mark.parametrize("clip", [False, True])
def test_parameters_that_become_float16_later_are_refused_at_the_first_step(accelerator_of, clip):
    accelerator = accelerator_of(mixed_precision="fp16")
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    model.half()
    accelerator.backward(model(X).float().sum())
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0) if clip else optimizer.step()


def test_a_refused_model_is_not_touched_and_leaves_no_unit(accelerator_of):
    accelerator = accelerator_of(mixed_precision="fp16")
    sound, half = net(), net().half()
    with pytest.raises(ConfigError, match="is float16"):
        accelerator.prepare(sound, half)
    assert accelerator.run.units == []
    assert "forward" not in sound.__dict__


def test_frozen_float16_parameters_may_stay(accelerator_of):
    model = net()
    model[0].half().requires_grad_(False)
    prepared = accelerator_of(mixed_precision="fp16").prepare(model)
    assert {parameter.dtype for parameter in prepared[0].parameters()} == {torch.float16}


def test_a_scaler_can_be_disabled(accelerator_of):
    accelerator = fp16(accelerator_of, enabled=False)
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    loss = model(X).float().sum()
    expected = torch.autograd.grad(loss, next(model.parameters()), retain_graph=True)[0]
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1e9)
    assert torch.equal(next(model.parameters()).grad, expected)
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_a_closure_is_refused_under_a_scaler(accelerator_of):
    accelerator = accelerator_of(mixed_precision="fp16")
    model = net()
    _, optimizer = accelerator.prepare(model, LBFGS(model.parameters()))
    with pytest.raises(AccelError, match="no loss scaler can follow"):
        optimizer.step(lambda: None)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # in LBFGS of torch 2.8
def test_a_closure_works_without_one(accelerator):
    model = net()
    model, optimizer = accelerator.prepare(model, LBFGS(model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        accelerator.backward(loss)
        return loss

    before = closure().item()
    optimizer.step(closure)
    assert model(X).square().mean().item() < before


class Spy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        if x is None:
            raise ValueError("no input")
        self.active = torch.is_autocast_enabled("cpu")
        return x * self.weight


class Found(NamedTuple):
    low: torch.Tensor
    number: torch.Tensor
    text: str


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        return Found(self.inner(x), torch.arange(3), "text")


@pytest.fixture
def spied(accelerator_of):
    accelerator = accelerator_of(mixed_precision="bf16")
    return accelerator, accelerator.prepare(Spy())


def test_a_prepared_model_and_the_unwrapped_one_run_under_autocast(spied):
    accelerator, model = spied
    for each in (model, accelerator.unwrap_model(model)):
        each(X)
        assert each.active
    assert not torch.is_autocast_enabled("cpu")


def test_the_unwrapped_model_can_be_had_without_autocast_with_the_same_weights(spied):
    accelerator, model = spied
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    plain(X)
    assert not plain.active
    assert plain.weight is model.weight
    model(X)
    assert model.active  # training goes on as before


@pytest.mark.parametrize("rebound", [True, False], ids=["method", "function"])
def test_without_autocast_a_forward_that_the_module_itself_has_stays(accelerator_of, rebound):
    accelerator, given = accelerator_of(mixed_precision="bf16"), net()
    inner = given.forward
    given.forward = (
        MethodType(lambda self, x: len(self) + inner(x), given) if rebound else lambda x: 1 + inner(x)
    )
    expected = given(X)
    plain = accelerator.unwrap_model(accelerator.prepare(given), keep_fp32_wrapper=False)
    assert torch.equal(plain(X), expected)
    if rebound:
        assert plain.forward.__self__ is plain


def test_a_copy_of_a_prepared_model_runs_without_autocast_too(spied):
    accelerator, model = spied
    plain = accelerator.unwrap_model(copy.deepcopy(model), keep_fp32_wrapper=False)
    plain(X)
    assert not plain.active


def test_a_model_of_two_runs_runs_without_the_autocast_of_either(spied, accelerator_of):
    _, model = spied
    second = accelerator_of(mixed_precision="bf16")
    plain = second.unwrap_model(second.prepare(model), keep_fp32_wrapper=False)
    plain(X)
    assert not plain.active


def test_a_view_without_autocast_is_taken_for_its_model(spied):
    accelerator, model = spied
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert accelerator.unwrap_model(plain) is plain
    assert accelerator.prepare(plain) is model
    assert len(accelerator.run.units) == 1
    with accelerator.accumulate(plain):
        assert accelerator.sync_gradients
    accelerator.free_memory()
    assert accelerator.prepare(plain) is model


def test_a_compiled_view_is_taken_for_its_model(spied):
    accelerator, model = spied
    compiled = torch.compile(accelerator.unwrap_model(model, keep_fp32_wrapper=False), backend="eager")
    with accelerator.accumulate(compiled):
        assert accelerator.sync_gradients
    with accelerator.no_sync(compiled):
        pass


def test_without_precision_the_model_unwraps_to_itself(accelerator):
    model = accelerator.prepare(net())
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model


def test_an_exception_in_forward_leaves_autocast(spied):
    with pytest.raises(ValueError, match="no input"):
        spied[1](None)
    assert not torch.is_autocast_enabled("cpu")


def test_a_deep_copy_runs_its_own_weights_under_autocast(spied):
    copied = copy.deepcopy(spied[1])
    with torch.no_grad():
        copied.weight.fill_(3.0)
    assert torch.equal(copied(X), X * 3)
    assert copied.active


def test_a_prepared_model_pickles(spied):
    file = io.BytesIO()
    torch.save(spied[1], file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    again(X)
    assert not again.active


def test_autocast_can_be_disabled(accelerator_of):
    accelerator = accelerator_of(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    model = accelerator.prepare(Spy())
    model(X)
    assert not model.active


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loss_outside_the_forward_is_that_of_plain_autocast(accelerator_of, precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    with torch.autocast("cpu", dtype=dtype):
        expected = net()(X)
    loss = accelerator_of(mixed_precision=precision).prepare(net())(X).square().mean()
    assert loss.dtype == torch.float32
    assert loss.item() == expected.float().square().mean().item()


def test_outputs_become_float32_within_any_structure(accelerator_of):
    found = accelerator_of(mixed_precision="bf16").prepare(Outputs())(X)
    assert type(found) is Found
    assert (found.low.dtype, found.number.dtype, found.text) == (torch.float32, torch.int64, "text")


def test_outputs_can_keep_their_16_bits(accelerator_of):
    handler = AutocastKwargs(outputs_to_fp32=False)
    model = accelerator_of(mixed_precision="bf16", kwargs_handlers=[handler]).prepare(net())
    assert model(X).dtype == torch.bfloat16


def test_a_16_bit_model_without_autocast_keeps_its_outputs(accelerator_of):
    assert accelerator_of().prepare(net().bfloat16())(X.bfloat16()).dtype == torch.bfloat16


class Stopped(BaseException):
    """No `Exception`, as the KeyboardInterrupt of a notebook's stop button."""


class Stoppable(nn.Module):
    def __init__(self, depth=0):
        super().__init__()
        self.inner, self.stop = net(), None
        self.within = Stoppable(depth - 1) if depth else None

    def forward(self, x):
        y = self.inner(x)
        if self.stop is not None:
            error, self.stop = self.stop, None
            raise error
        return y if self.within is None else y + self.within(x)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, Stopped])
def test_a_stopped_forward_leaves_autocast_and_trains_on_undisturbed(accelerator_of, error):
    def losses(stop):
        model = accelerator_of(mixed_precision="bf16").prepare(Stoppable())
        optimizer = SGD(model.parameters(), lr=0.1)
        if stop:
            model.stop = error()
            with pytest.raises(error):
                model(X)
            assert not torch.is_autocast_enabled("cpu")
        found = []
        for _ in range(4):
            loss = model(X).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_a_stopped_forward_of_a_prepared_model_within_another_leaves_autocast(accelerator_of):
    accelerator, outer = accelerator_of(mixed_precision="bf16"), Stoppable(1)
    accelerator.prepare(outer.within)
    accelerator.prepare(outer)
    outer.within.stop = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        outer(X)
    assert not torch.is_autocast_enabled("cpu")


def test_threads_that_run_one_model_each_leave_autocast(accelerator_of):
    model = accelerator_of(mixed_precision="bf16").prepare(Stoppable())
    left = []

    def run():
        with contextlib.suppress(KeyboardInterrupt):
            model(X)
        left.append(torch.is_autocast_enabled("cpu"))

    model.stop = KeyboardInterrupt()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [False] * 4


def test_forward_keeps_its_signature_and_is_the_classs_again_after_the_run(accelerator_of):
    accelerator = accelerator_of(mixed_precision="bf16")
    model = accelerator.prepare(Spy())
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    accelerator.end_training()
    assert "forward" not in model.__dict__


def test_the_autocast_context_serves_what_is_outside_models(spied):
    with spied[0].autocast():
        assert torch.is_autocast_enabled("cpu")


def test_the_autocast_context_takes_settings_of_its_own(spied):
    with spied[0].autocast(AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu")
    with spied[0].autocast(AutocastKwargs(cache_enabled=False)):
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_the_seeds_functions_give_the_live_runs_autocast_and_a_scaler(accelerator_of):
    gc.collect()  # a run that another test dropped is live until then
    accelerator_of(mixed_precision="bf16")
    with get_mixed_precision_context_manager(native_amp=True):
        assert torch.is_autocast_enabled("cpu")
    with get_mixed_precision_context_manager():
        assert not torch.is_autocast_enabled("cpu")
    assert get_grad_scaler(init_scale=4.0).get_scale() == 4.0


def test_prepared_optimizers_copy_and_pickle_as_the_inner_one(accelerator):
    model = net()
    _, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    assert type(copy.deepcopy(optimizer)) is SGD
    assert type(pickle.loads(pickle.dumps(optimizer))) is SGD


def test_a_scheduler_made_on_a_prepared_optimizer_works(accelerator):
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    scheduler = accelerator.prepare(StepLR(optimizer, 1, gamma=0.1))
    accelerator.backward(model(X).sum())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.by_default
def test_no_model_outlives_free_memory(accelerator_of, precision):
    accelerator = accelerator_of(mixed_precision=precision)
    alive = []
    for _ in range(2):
        model = net()
        alive.append(weakref.ref(model))
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        with accelerator.accumulate(model):
            accelerator.backward(model(X).square().mean())
            optimizer.step()
        model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_a_late_optimizer_that_is_refused_leaves_the_models_autocast(accelerator_of, monkeypatch):
    accelerator = accelerator_of(mixed_precision="bf16")
    model = accelerator.prepare(Spy())
    (unit,) = accelerator.run.units

    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(unit.hooks, "wrap_optimizer", fails)
    with pytest.raises(ZeroDivisionError):
        accelerator.prepare(SGD(model.parameters(), lr=0.1))
    model(X)
    assert model.active


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, X)])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning", "ignore:.torch.jit.:FutureWarning")
def test_a_torchscript_model_trains(accelerator_of, make, precision):
    accelerator = accelerator_of(mixed_precision=precision)
    model = make(net())
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        loss = model(X).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]


def test_what_is_set_on_a_prepared_scheduler_reaches_it(accelerator):
    model = net()
    optimizer = SGD(model.parameters(), lr=1.0)
    inner = StepLR(optimizer, 1, gamma=0.1)
    _, _, scheduler = accelerator.prepare(model, optimizer, inner)
    scheduler.last_epoch, scheduler.gamma = 7, 0.5
    assert (inner.last_epoch, inner.gamma) == (7, 0.5)


def test_what_is_set_on_a_prepared_optimizer_reaches_it(accelerator):
    model = net()
    inner = SGD(model.parameters(), lr=1.0)
    inner.mode = "slow"
    _, optimizer = accelerator.prepare(model, inner)
    optimizer.defaults, optimizer.mode, optimizer.new = {"lr": 0.5}, "fast", 1
    assert (inner.defaults, inner.mode, inner.new) == ({"lr": 0.5}, "fast", 1)
