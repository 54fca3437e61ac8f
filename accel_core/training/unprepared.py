"""Optimizers that were not prepared, of models that were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.contract.unit import Unit


def refuse_unfinished_steps(unit: Unit) -> None:
    """Raise where an optimizer steps by gradients of a unit that are not final.

    Not reduced, not divided by items, or scaled, where no prepared optimizer holds their parameters. Each
    rank would train a model of its own, or by gradients of another scale, silently.
    """

    def check(optimizer: Optimizer, *call: Any) -> None:
        unit = found()
        if unit is None or optimizer in unit.optimizers:
            return
        reason, known = _why_not_final(unit, optimizer), unit.run.prepared.parameters
        if reason and any(known.leave_out(unit, group["params"]) for group in optimizer.param_groups):
            raise AccelError(
                f"the {type(optimizer).__name__} steps weights of unit {unit.name!r} that no prepared"
                f" optimizer holds, {reason}\n"
                "prepare the optimizer too: model, optimizer = accelerator.prepare(model, optimizer)"
            )

    handle = register_optimizer_step_pre_hook(check)
    found = ref(unit, lambda gone: handle.remove())  # which torch keeps: it must not keep the run
    unit.detach.append(handle.remove)


def _why_not_final(unit: Unit, optimizer: Optimizer) -> str:
    """Return why the unit's gradients are not final; no text if they are."""
    if unit.window.items is not None and not unit.step_state.is_reduced(None):
        return "and accumulate(items=...) divides its gradients when a prepared one steps"
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
