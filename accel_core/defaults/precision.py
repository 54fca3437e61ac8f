"""fp32, bf16 and fp16: autocast around the forward, and fp16's loss scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.amp import GradScaler

from accel_core.contract import hooks
from accel_core.contract.hooks import implements
from accel_core.contract.run import current
from accel_core.distributed.exchange import collective_call
from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.bound import Hooks
    from accel_core.contract.config import AutocastKwargs
    from accel_core.contract.run import Run
    from accel_core.contract.state import Entry
    from accel_core.contract.unit import Unit


def autocast(run: Run, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
    """Return the autocast context of the run, which enters the contexts of all plugins.

    handler: settings for the code inside, instead of the run's.
    """
    unit = run.units[0] if run.units else run.make_unit(None, None)
    factory = unit.hooks.autocast(unit)
    context: AbstractContextManager[Any] = nullcontext() if factory is None else factory()
    return context if handler is None else _adjusted(run, context, handler)


@contextmanager
def _adjusted(run: Run, context: AbstractContextManager[Any], handler: AutocastKwargs) -> Iterator[None]:
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
        distributed_type: accepted and ignored: the device decides.
        run: required if the process has several runs.
        kwargs: passed to torch's GradScaler.
    """
    return GradScaler((run or current()).device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None, *, run: Run | None = None
) -> AbstractContextManager[Any]:
    """Return the autocast context of a run; without `native_amp`, a context that does nothing."""
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


class LossScaler(GradScaler):
    """torch's loss scaler, for optimizers whose gradients a run unscales and applies.

    A strategy that shards returns a subclass from hook `grad_scaler`, whose ranks agree on an overflow.
    """

    is_collective = False
    """True if ranks that have no gradients of an optimizer must call `unscale_` too."""

    def unscale_(self, optimizer: Any) -> None:
        if isinstance(optimizer, torch.optim.Optimizer):
            raise AccelError(
                f"the loss scaler of a run was asked to unscale a {type(optimizer).__name__}, and the run"
                " would not know that its gradients are unscaled\n"
                "call accelerator.unscale_gradients(optimizer)"
            )
        super().unscale_(optimizer)


class Float16(_Autocast):
    """Autocast to float16, and one loss scale for the run, the same on all ranks.

    After a backward, all gradients of the run are multiplied by the scale; `unscale` divides the gradients of
    an optimizer. The scale changes once no gradients wait for a step, or else at the next backward, never
    between the steps of two optimizers. Gradients that wait for a later step are then rescaled.
    """

    dtype = torch.float16

    def __init__(self, config: Any, run: Run) -> None:
        super().__init__(config, run)
        self._shared: GradScaler | None = None
        self._is_due = False
        """True if gradients were unscaled since the last update of the scale."""
        self._appliers: dict[Optimizer, _Applier] = {}

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        half = _half(item for model in models for item in model.named_parameters())
        own, used = unit.hooks.grad_scaler(unit), self._used()
        if own is None or used is None or own is used:
            return half
        reason = (
            f"mixed_precision fp16 has one loss scaler per run, and strategy {unit.strategy!r} brings another"
            "\nprepare the models of this strategy first"
        )
        return [*half, reason]

    @implements(hooks.grad_scaler)
    def grad_scaler(self, unit: Unit) -> GradScaler | None:
        self._shared = self._used() or self._shared or self.below.grad_scaler(unit)
        if self._shared is None:
            self._shared = LossScaler(self.run.device.type, **self.run.config.grad_scaler.to_kwargs())
        return self._shared

    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None:
        if not unit.optimizers:  # no optimizer would unscale the gradients
            self.below.backward(unit, loss, boundary, options)
            return
        scaler = _scaler(unit)
        self._begin(scaler)
        self.below.backward(unit, scaler.scale(loss), boundary, options)

    @implements(hooks.unscale)
    def unscale(self, unit: Unit, optimizer: Optimizer) -> None:
        applier, scaler = self._applier(unit, optimizer), _scaler(unit)
        takes_part = applier.has_gradients() or getattr(scaler, "is_collective", False)
        if applier.stage != "scaled" or not takes_part or not scaler.is_enabled():
            return
        scaler.unscale_(applier)  # type: ignore[arg-type]
        applier.stage, self._is_due = "unscaled", True

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        if closure is not None:
            raise AccelError(
                "optimizer.step(closure) evaluates the loss several times per step;"
                " no loss scaler can follow\nuse mixed_precision bf16 or 'no' with this optimizer"
            )
        applier, scaler = self._applier(unit, optimizer), _scaler(unit)
        self.below.mark_step("host_read")
        self.unscale(unit, optimizer)
        if applier.stage != "unscaled":  # no gradients: as in plain PyTorch, not an error
            applied: bool = self.below.optimizer_step(unit, optimizer, None)
            return applied
        applier.applied = False
        scaler.step(applier)  # type: ignore[arg-type]
        applier.stage = "stepped"
        if all(each.stage == "stepped" for each in self._sharing(scaler) if each.has_gradients()):
            self._update(scaler)
        return applier.applied

    @implements(hooks.save_state)
    def save_state(self, unit: Unit) -> Mapping[str, Entry]:
        if unit.scaler is None:
            return {}
        from accel_core.contract.state import Entry  # late: start-up need not wait for it

        self._begin(unit.scaler)
        return {"scaler": Entry(value=unit.scaler.state_dict())}

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
        if unit.scaler is not None and "scaler" in entries:
            self._begin(unit.scaler)
            state: Any = entries["scaler"].value
            self._change(unit.scaler, partial(unit.scaler.load_state_dict, state))

    @implements(hooks.average_parameters)
    def average_parameters(self, unit: Unit) -> None:
        """Continue with the smallest scale of all ranks, so that it grows on all ranks at the same step."""
        scaler = unit.scaler
        if scaler is not None and scaler.is_enabled():
            self._begin(scaler)
            state = scaler.state_dict()
            keys = [key for key in ("scale", "_growth_tracker") if key in state]
            with collective_call(self.run, "world", "average_parameters", None, objects=True) as call:
                of_ranks = call.all_objects([state[key] for key in keys])
            state |= {key: min(values) for key, *values in zip(keys, *of_ranks, strict=True)}
            self._change(scaler, partial(scaler.load_state_dict, state))

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        for optimizer in unit.optimizers:
            self._appliers.pop(optimizer, None)

    def _used(self) -> GradScaler | None:
        """Return the loss scaler of the run's units; None before the first unit has one."""
        return next((unit.scaler for unit in self.run.units if unit.scaler is not None), None)

    def _begin(self, scaler: GradScaler) -> None:
        """Update the scale if an update is due, and multiply all gradients that wait for a step by it."""
        if self._is_due:
            self._change(scaler, scaler.update)
        elif any(each.stage != "scaled" for each in self._appliers.values()):
            self._change(scaler, _nothing)

    def _update(self, scaler: GradScaler) -> None:
        """Update the scale if an update is due, while no gradients wait for a step."""
        if self._is_due:
            scaler.update()
            self._is_due = False

    def _change(self, scaler: GradScaler, change: Callable[[], object]) -> None:
        """Change the scale, and rescale all gradients that wait for a step."""
        sharing = self._sharing(scaler)
        waiting = [each for each in sharing if each.has_gradients()]
        before = scaler.get_scale() if waiting else 1.0
        change()
        for each in waiting:
            each.multiply(scaler.get_scale() / (before if each.stage == "scaled" else 1.0))
        for each in sharing:
            each.stage = "scaled"
        self._is_due = False

    def _sharing(self, scaler: GradScaler) -> list[_Applier]:
        """Return the appliers of all optimizers whose losses this scaler scales."""
        units = [unit for unit in self.run.units if unit.scaler is scaler]
        return [self._applier(unit, optimizer) for unit in units for optimizer in unit.optimizers]

    def _applier(self, unit: Unit, optimizer: Optimizer) -> _Applier:
        applier = self._appliers.get(optimizer)
        if applier is None:
            applier = self._appliers[optimizer] = _Applier(self.below, unit, optimizer)
        return applier


class _Applier:
    """The optimizer interface that a loss scaler needs: `step` runs the hooks of the layers below.

    Attributes:
        stage: stage of the gradients. "stepped": they were unscaled, then applied or skipped.
        applied: whether the last step applied the gradients.
    """

    def __init__(self, below: Hooks, unit: Unit, optimizer: Optimizer) -> None:
        self._below, self._unit, self._optimizer = below, unit, optimizer
        self.stage: Literal["scaled", "unscaled", "stepped"] = "scaled"
        self.applied = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def step(self) -> None:
        self.applied = self._below.optimizer_step(self._unit, self._optimizer, None)

    def has_gradients(self) -> bool:
        return any(True for _ in self._gradients())

    def multiply(self, factor: float) -> None:
        for gradient in self._gradients() if factor != 1.0 else ():
            local = getattr(gradient, "_local_tensor", gradient)
            (local._values() if local.is_sparse else local).mul_(factor)

    def _gradients(self) -> Iterator[Tensor]:
        parameters = (each for group in self.param_groups for each in group["params"])
        return (each.grad for each in parameters if each.grad is not None)


def _nothing() -> None:
    return None


def _scaler(unit: Unit) -> GradScaler:
    assert unit.scaler is not None
    return unit.scaler


def _half(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Return a reason to refuse if parameters with gradients are float16."""
    half = [name for name, it in parameters if it.requires_grad and it.dtype == torch.float16]
    if not half:
        return []
    reason = (
        f"mixed_precision fp16 trains float32 parameters, but {half[0]} is float16"
        f" ({len(half)} such parameter(s)): their gradients could not be unscaled\n"
        "load the model in float32 (model.float()); autocast still computes in float16"
    )
    return [reason]
