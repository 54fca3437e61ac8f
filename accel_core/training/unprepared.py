"""Optimizers that were not prepared, of models that were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_core.errors import AccelError
from accel_core.training.step_state import is_nonzero

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.unit import Unit

_MARK: Final = "_accel_scaled"
"""Attribute of gradients of a scaled loss, in units without optimizers."""
_NAMED: Final = "; or name the model of a loss of its own: accelerator.backward(loss, model=model)"
_parameters: WeakKeyDictionary[Unit, list[nn.Parameter]] = WeakKeyDictionary()
"""Unit -> its parameters, which take long to name."""


def refuse_unfinished_steps(unit: Unit) -> None:
    """Raise where an optimizer steps by gradients of a unit that are not final.

    Not reduced, not divided by items, or scaled, where no prepared optimizer holds their parameters. Each
    rank would train a model of its own, or by gradients of another scale, silently. Where one does, it may
    step by another optimizer, but gradients that are still scaled are stepped by none.
    """

    def check(optimizer: Optimizer, *call: Any) -> None:
        unit = found()
        if unit is None:
            return
        reason = "" if optimizer in unit.optimizers else _why_not_final(unit, optimizer)
        known = unit.run.prepared.parameters
        if reason and any(known.leave_out(unit, group["params"]) for group in optimizer.param_groups):
            raise AccelError(
                f"the {type(optimizer).__name__} steps weights of unit {unit.name!r} that no prepared"
                f" optimizer holds, {reason}\n"
                "prepare the optimizer too: model, optimizer = accelerator.prepare(model, optimizer)"
                + (_NAMED if unit.step_state.has_scaled else "")
            )
        if _steps_past_the_scaler(unit, optimizer):
            raise AccelError(
                f"the {type(optimizer).__name__} steps weights of unit {unit.name!r} past the optimizer that"
                " was prepared, by gradients that are still multiplied by the loss scale\n"
                "call step() of what accelerator.prepare(...) returned, or unscale_gradients() before; if"
                " they are of a loss's own backward(), which scales nothing, clear what was there before by"
                " zero_grad() of what prepare returned, not of the model"
            )

    handle = register_optimizer_step_pre_hook(check)
    found = ref(unit, lambda gone: handle.remove())  # which torch keeps: it must not keep the run
    unit.detach.append(handle.remove)


def _steps_past_the_scaler(unit: Unit, optimizer: Optimizer) -> bool:
    state, scaler = unit.step_state, unit.scaler
    if scaler is None or not scaler.is_enabled() or scaler._found_inf_per_device(optimizer):
        return False  # as in each step of ours
    prepared = unit.run.prepared
    if any(optimizer in each.optimizers for each in prepared.trained if each is not unit):
        return False  # it may hold a tied weight, and its own unit asks
    if state.reduced:  # for the step of one
        waiting = [each for each in state.reduced if each and not scaler._found_inf_per_device(each)]
        held = {each for one in waiting for each in _with_gradients(one)}
        return bool(held) and not held.isdisjoint(_with_gradients(optimizer))
    if not (state.with_gradients or state.sharing):
        return False
    return any(unit in prepared.parameters.units_of(group["params"]) for group in optimizer.param_groups)


def _why_not_final(unit: Unit, optimizer: Optimizer) -> str:
    """Return why the unit's gradients are not final; no text if they are."""
    if unit.window.items is not None and not unit.step_state.is_reduced(None, unit.window):
        return "and accumulate(items=...) divides its gradients when a prepared one steps"
    if unit.step_state.has_scaled and _steps_by_scaled(optimizer):
        return "and its gradients are those of a loss that was scaled for the optimizer of another unit"
    scaler = unit.scaler if unit.optimizers else None
    if scaler is not None and scaler.is_enabled() and not scaler._found_inf_per_device(optimizer):
        return "and its gradients are multiplied by the loss scale until a prepared one steps"
    if unit.run.world.size == 1:
        return ""
    if unit.steps.reduce_gradients is not None:
        return f"and strategy {unit.strategy!r} reduces gradients when a prepared one steps"
    always = unit.steps.no_sync is None or unit.run.config.accumulation.sync_each_batch
    if always or unit.window.boundary or unit.is_in_no_sync:
        return ""
    return f"in a window of {unit.window.size}, whose gradients are reduced in the last micro-batch"


# -- gradients of a loss that was scaled otherwise than those of the unit ------------------------------


@contextmanager
def scaled(units: Sequence[Unit], own: Sequence[Unit]) -> Iterator[None]:
    """Mark the gradients of these units that a backward inside changes.

    own: units that the backward scales for, whose gradients get no mark.
    """
    before = [(unit, each, each.grad, _version(each.grad)) for unit in units for each in _trained_in(unit)]
    begun = [each for unit in own for each in _trained_in(unit) if not _is_kept(each.grad)]
    try:
        yield
    finally:
        for parameter in begun:  # a strategy may give it the tensor again that had a mark and was dropped
            if _is_scaled(parameter.grad):
                delattr(parameter.grad, _MARK)
        for unit, parameter, gradient, version in before:
            now = parameter.grad
            if now is not None and (now is not gradient or _version(now) != version):
                setattr(now, _MARK, True)
                unit.step_state.note_scaled()


def refuse_scaled(unit: Unit, optimizer: Optimizer | None) -> None:
    """Raise if the optimizer's gradients are of a loss that was scaled otherwise.

    Without one, the gradients of all optimizers of the unit.
    """
    optimizers = unit.optimizers if optimizer is None else [optimizer]
    groups = [group for each in optimizers for group in each.param_groups]
    asked = [each for group in groups for each in group["params"]]
    if any(_is_kept(each.grad) for each in asked):
        raise AccelError(
            f"unit {unit.name!r} has gradients of a loss for which backward(loss, model=...) or"
            " accumulate(...) named other models only: it was scaled for those, and cannot be unscaled here\n"
            "leave model= out, and name all models that the loss trains in accumulate; or call"
            " optimizer.zero_grad() before this unit's own loss"
        )


def _with_gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]


def _steps_by_scaled(optimizer: Optimizer) -> bool:
    return any(_is_scaled(each.grad) for each in _with_gradients(optimizer))


def _is_scaled(gradient: Tensor | None) -> bool:
    return hasattr(gradient, _MARK)


def _trained_in(unit: Unit) -> list[nn.Parameter]:
    if unit not in _parameters:
        _parameters[unit] = [*unit.named_parameters().values()]
    return [each for each in _parameters[unit] if each.requires_grad]


def _is_kept(gradient: Tensor | None) -> bool:
    return gradient is not None and _is_scaled(gradient) and is_nonzero(gradient)


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else _local(gradient)._version


def _local(gradient: Any) -> Any:
    return getattr(gradient, "_local_tensor", gradient)
