"""fp32, bf16 and fp16: autocast around the forward, and fp16's loss scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch.amp import GradScaler

from accel_core.config.convert import check_object
from accel_core.contract import hooks
from accel_core.contract.config import AutocastKwargs
from accel_core.contract.hooks import implements
from accel_core.contract.run import current
from accel_core.errors import AccelError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.run import Run
    from accel_core.contract.state import Entry
    from accel_core.contract.unit import Unit
    from accel_core.plugins.binding import Hooks


def autocast(run: Run, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
    """Return the run's autocast, of all its plugins' contexts.

    handler: other settings for what is inside.
    """
    unit = run.units[0] if run.units else run.make_unit(None, None)
    factory = unit.hooks.autocast(unit)
    context: AbstractContextManager[Any] = nullcontext() if factory is None else factory()
    return context if handler is None else _adjusted(run, context, handler)


@contextmanager
def _adjusted(run: Run, context: AbstractContextManager[Any], handler: AutocastKwargs) -> Iterator[None]:
    if not isinstance(handler, AutocastKwargs):
        raise ConfigError(
            f"autocast was given {handler!r:.80}, and not AutocastKwargs\n"
            "give AutocastKwargs(...), or nothing for the run's settings"
        )
    check_object(handler)
    kind = run.device.type
    with context:
        enabled = handler.enabled and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=handler.cache_enabled):
            yield


def get_grad_scaler(
    distributed_type: str | None = None, *, run: Run | None = None, **kwargs: Any
) -> GradScaler:
    """Return a loss scaler for the device of a run; `prepare` makes its own.

    Args:
        distributed_type: accepted and not needed: the device decides.
        run: needed where there are several.
        kwargs: for torch's GradScaler.
    """
    return GradScaler((run or current()).device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None, *, run: Run | None = None
) -> AbstractContextManager[Any]:
    """Return the autocast of a run; without `native_amp` a context that does nothing."""
    return autocast(run or current(), autocast_kwargs) if native_amp else nullcontext()


class Unchanged:
    """Precision that adds nothing to the base layer."""

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run


class _Autocast:
    dtype: torch.dtype
    below: Hooks

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run

    @implements(hooks.autocast)
    def autocast(self, unit: Unit) -> Callable[[], AbstractContextManager[Any]] | None:
        options = self.run.config.autocast
        if not options.enabled:
            return None
        return partial(
            torch.autocast, self.run.device.type, dtype=self.dtype, cache_enabled=options.cache_enabled
        )


class BFloat16(_Autocast):
    """Autocast to bfloat16."""

    dtype = torch.bfloat16


class Float16(_Autocast):
    """Autocast to float16, and one loss scaler per unit.

    The scaler is updated once all optimizers of its unit have stepped, or else at the next backward: never
    between the steps of two optimizers. Gradients that wait for a later step follow the scale then.
    """

    dtype = torch.float16

    def __init__(self, config: Any, run: Run) -> None:
        super().__init__(config, run)
        self._due: WeakSet[GradScaler] = WeakSet()
        """Scalers that have unscaled gradients since their last update."""
        self._steppers: dict[Optimizer, _Stepper] = {}

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        return _half(item for model in models for item in model.named_parameters())

    @implements(hooks.grad_scaler)
    def grad_scaler(self, unit: Unit) -> GradScaler | None:
        options = self.run.config.grad_scaler.to_kwargs()
        return self.below.grad_scaler(unit) or GradScaler(self.run.device.type, **options)

    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None:
        if not unit.optimizers:  # none that unscales
            with self._marking(unit, None):
                self.below.backward(unit, loss, boundary, options)
            return
        scaler = self._scaler(unit)
        self._update(scaler)
        sharing = self._sharing(scaler)
        for stepper in sharing:
            if stepper.stage != "scaled":  # but stepped, or unscaled by a scaler of before
                if stepper.has_gradients():  # that were not cleared: this adds to them
                    stepper.multiply(scaler.get_scale())
                stepper.stage = "scaled"
        with self._marking(unit, scaler):
            self.below.backward(unit, scaler.scale(loss), boundary, options)
        for stepper in sharing:
            stepper.note_gradient()

    @implements(hooks.unscale)
    def unscale(self, unit: Unit, optimizer: Optimizer) -> None:
        self._unscale(self._stepper(unit, optimizer))

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        if closure is not None:
            raise AccelError(
                "optimizer.step(closure) evaluates the loss several times per step;"
                " no loss scaler can follow\nuse mixed_precision bf16 or 'no' with this optimizer"
            )
        scaler, stepper = self._scaler(unit), self._stepper(unit, optimizer)
        is_second = stepper.stage == "stepped" and scaler.is_enabled()
        if is_second and stepper.has_gradients():
            raise AccelError(
                "mixed_precision fp16: no loss was scaled since the last optimizer.step(): it was called"
                " twice, or after loss.backward(), which does not scale\n"
                "call accelerator.backward(loss) before each step"
            )
        stepper.applied = False
        self.below.mark_step("host_read")
        self._unscale(stepper)
        if is_second or stepper.stage == "scaled":  # no gradients, which is no error in plain PyTorch
            applied: bool = self.below.optimizer_step(unit, optimizer, None)
            return applied
        scaler.step(stepper)  # type: ignore[arg-type]
        stepper.stage = "stepped"
        if not stepper.applied:
            stepper.drop_unheld()
        sharing = self._sharing(scaler)
        if all(each.unit is unit and each.stage == "stepped" for each in sharing):
            self._update(scaler)
        return stepper.applied

    @implements(hooks.save_state)
    def save_state(self, unit: Unit) -> Mapping[str, Entry]:
        if unit.scaler is None:
            return {}
        from accel_core.contract.state import Entry  # late: start-up need not wait for it

        self._update(unit.scaler)
        return {"scaler": Entry(value=unit.scaler.state_dict())}

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
        if unit.scaler is not None and "scaler" in entries:
            self._update(unit.scaler)
            state: Any = entries["scaler"].value
            self._change(unit.scaler, partial(unit.scaler.load_state_dict, state))

    @implements(hooks.parameters_averaged)
    def parameters_averaged(self, unit: Unit) -> None:
        """Go on with the smallest scale, which grows on all ranks at once."""
        scaler = unit.scaler
        if scaler is not None and scaler.is_enabled():
            self._update(scaler)
            state = scaler.state_dict()
            keys = [key for key in ("scale", "_growth_tracker") if key in state]
            told = torch.tensor([state[key] for key in keys], dtype=torch.float64, device="cpu")
            self.run.collectives("control").all_reduce(told, "min")
            state |= {key: type(state[key])(value) for key, value in zip(keys, told.tolist(), strict=True)}
            self._change(scaler, partial(scaler.load_state_dict, state))

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        for optimizer in unit.optimizers:
            self._steppers.pop(optimizer, None)

    def _marking(self, unit: Unit, scaler: GradScaler | None) -> AbstractContextManager[Any]:
        """Mark gradients that a backward leaves in units of another scaler, or none."""
        if len(self.run.units) == 1 or not self._scaler(unit).is_enabled():
            return nullcontext()
        from accel_core.training.unprepared import scaled  # late: few runs need it

        others, own = [], []
        for each in self.run.units:
            if (each.scaler if each.optimizers else None) is not scaler:
                others.append(each)
            elif each.step_state.has_scaled:
                own.append(each)
        return scaled(others, own) if others or own else nullcontext()

    def _scaler(self, unit: Unit) -> GradScaler:
        assert unit.scaler is not None
        return unit.scaler

    def _unscale(self, stepper: _Stepper) -> None:
        """Divide gradients by the scale, unless they are already.

        Note that they are once they are, also if this fails then.
        """
        if stepper.stage != "scaled":
            return
        scaler = self._scaler(stepper.unit)
        if (probe := stepper.edited()) is not None:
            of_others = any(each.stage != "scaled" for each in self._sharing(scaler))
            if not (of_others and stepper.sees_others()):
                _warn_of_edits(stepper.unit, probe)
        try:
            with _named(stepper):
                scaler.unscale_(stepper)  # type: ignore[arg-type]
        finally:
            if not scaler.is_enabled() or scaler._found_inf_per_device(stepper):  # type: ignore[arg-type]
                stepper.stage = "unscaled"
                self._due.add(scaler)  # until its update it unscales no others
                stepper.share_state(scaler)
            else:  # there were none: those that come are to be unscaled
                scaler._per_optimizer_states.pop(id(stepper), None)

    def _update(self, scaler: GradScaler) -> None:
        """Update the scale, if that is due, and that of gradients that wait."""
        if scaler in self._due:
            self._change(scaler, scaler.update)  # which forgets what is unscaled
            self._due.discard(scaler)

    def _change(self, scaler: GradScaler, change: Callable[[], object]) -> None:
        """Change the scale, and that of gradients that wait."""
        others = [each for each in self._sharing(scaler) if each.stage != "stepped"]
        waiting = [each for each in others if each.has_gradients()]
        before = scaler.get_scale() if waiting else 1.0
        change()
        for each in waiting:
            each.multiply(scaler.get_scale() / (1.0 if each.stage == "unscaled" else before))
        for each in others:
            each.stage = "scaled"

    def _sharing(self, scaler: GradScaler) -> list[_Stepper]:
        """Return the steppers of all optimizers that step by losses of this scale."""
        units = [unit for unit in self.run.units if unit.scaler is scaler]
        return [self._stepper(unit, optimizer) for unit in units for optimizer in unit.optimizers]

    def _stepper(self, unit: Unit, optimizer: Optimizer) -> _Stepper:
        stepper = self._steppers.get(optimizer)
        if stepper is None:
            stepper = self._steppers[optimizer] = _Stepper(self.below, self.run, unit, optimizer)
        return stepper


def _half(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Describe parameters that train in float16, if there are any."""
    half = [name for name, it in parameters if it.requires_grad and it.dtype == torch.float16]
    if not half:
        return []
    reason = (
        f"mixed_precision fp16 trains float32 parameters, but {half[0]} is float16"
        f" ({len(half)} such parameter(s)): their gradients could not be unscaled\n"
        "load the model in float32 (model.float()); autocast still computes in float16"
    )
    return [reason]


@contextmanager
def _named(stepper: _Stepper) -> Iterator[None]:
    """Add the parameter, or the missing call, to errors of torch's scaler.

    Without gradients there is nothing to unscale, also before the first loss.
    """
    try:
        yield
    except AssertionError as error:
        if "_scale is None" not in str(error):
            raise
        if not stepper.has_gradients():
            return
        raise AccelError(
            "mixed_precision fp16: gradients cannot be unscaled, as no loss was scaled; loss.backward() does"
            " not scale\ncall accelerator.backward(loss)"
        ) from error
    except ValueError as error:
        for reason in _half(stepper.unit.named_parameters().items()):
            raise ConfigError(reason) from error
        raise


def _warn_of_edits(unit: Unit, probe: nn.Parameter) -> None:
    """Warn of a gradient that was changed while it was scaled, such as by a clip.

    A mask or a factor is right there, and so is a clearing in place. Where a window's end reduces or divides,
    others change gradients too.
    """
    if unit.steps.reduce_gradients is not None or unit.window.items is not None:
        return
    # late: few runs need them
    from accel_core.distributed.logging import get_logger
    from accel_core.training.step_state import is_nonzero

    if probe.grad is not None and not is_nonzero(probe.grad):
        return
    name = next((name for name, each in unit.named_parameters().items() if each is probe), "a parameter")
    get_logger(__name__).warning_once(
        "mixed_precision fp16: the gradient of %s was changed between backward and the step, where gradients"
        " are multiplied by the loss scale: a clip or another threshold means something else there\n"
        "clip by accelerator.clip_grad_norm_ or clip_grad_value_; call accelerator.unscale_gradients() before"
        " other changes",
        name,
    )


class _Stepper:
    """Stand-in for an optimizer, which torch's scaler steps.

    It steps through the layers below, and notes whether it did. The first of a unit also stands for the
    parameters that no optimizer of the unit holds: they are clipped with the others.

    stage: of the gradients since the last backward. stepped: unscaled, and applied or skipped.
    """

    def __init__(self, below: Hooks, run: Run, unit: Unit, optimizer: Optimizer) -> None:
        self.unit = unit
        self._below, self._run, self._optimizer = below, run, optimizer
        self.stage: Literal["scaled", "unscaled", "stepped"] = "scaled"
        self.applied = False
        self._probe: nn.Parameter | None = None
        self._noted: tuple[int, int] | None = None
        """Of the probe's gradient, after the last backward."""
        held, is_first = self._held(), unit.optimizers[0] is optimizer
        named = unit.named_parameters() if is_first else {}
        self._beside = [each for each in named.values() if id(each) not in held]

    def _held(self) -> set[int]:
        """Return ids of what an optimizer of the run holds, or an earlier unit has."""
        units = [unit for unit in self._run.units if unit.optimizers]
        groups = [group for unit in units for each in unit.optimizers for group in each.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        earlier = units[: units.index(self.unit)] if self.unit in units else ()
        return held.union(id(each) for unit in earlier for each in unit.named_parameters().values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        unheld = self._unheld()
        return [*groups, {"params": unheld}] if unheld else groups

    def drop_unheld(self) -> None:
        """Clear what overflowed, where no optimizer clears it."""
        for parameter in self._unheld():
            parameter.grad = None

    def _unheld(self) -> list[nn.Parameter]:
        """Return what has gradients and, by now, no optimizer."""
        trained = [each for each in self._beside if each.grad is not None]
        held = self._held() if trained else ()
        return [each for each in trained if id(each) not in held]

    def share_state(self, scaler: GradScaler) -> None:
        """Have the scaler say of the optimizer itself, too, that it is unscaled."""
        if scaler.is_enabled():
            states = scaler._per_optimizer_states
            states[id(self._optimizer)] = states[id(self)]

    def step(self) -> None:
        self.applied = self._below.optimizer_step(self.unit, self._optimizer, None)

    def has_gradients(self) -> bool:
        """Return True if one of its parameters has a gradient."""
        return any(True for _ in self._gradients())

    def note_gradient(self) -> None:
        """Note the state of one gradient, after a backward."""
        if self._probe is None or self._probe.grad is None:
            held = (each for group in self._optimizer.param_groups for each in group["params"])
            self._probe = next((each for each in held if each.grad is not None), None)
        if self._probe is not None:
            self._noted = _version(self._probe.grad)

    def edited(self) -> nn.Parameter | None:
        """Return the parameter whose gradient was noted, if that was changed since."""
        probe = self._probe
        is_same = probe is None or probe.grad is None or _version(probe.grad) == self._noted
        return None if is_same else probe

    def sees_others(self) -> bool:
        """Return True if the noted gradient is a view.

        Views of one buffer count changes together.
        """
        return self._probe is not None and self._probe.grad is not None and self._probe.grad._is_view()

    def multiply(self, factor: float) -> None:
        """Multiply the gradients, which counts as no change of them."""
        for gradient in self._gradients() if factor != 1.0 else ():
            local = getattr(gradient, "_local_tensor", gradient)
            values = local._values() if local.is_sparse else local
            values.data.mul_(factor)

    def _gradients(self) -> Iterator[Tensor]:
        parameters = (each for group in self.param_groups for each in group["params"])
        return (each.grad for each in parameters if each.grad is not None)


def _version(gradient: Any) -> tuple[int, int]:
    """Return (id, number of changes in place).

    Strategies look at one buffer by views that they make anew.
    """
    local = getattr(gradient, "_local_tensor", gradient)
    return 0 if gradient._is_view() else id(gradient), gradient._version + local._version
