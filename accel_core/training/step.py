"""The order of a training step, as calls of a unit's bound hooks.

forward -> backward -> at the boundary: reduce -> unscale -> clip -> optimizer -> after -> zero
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_

from accel_core.data.uneven import check_unit
from accel_core.errors import AccelError
from accel_core.training.step_state import Phase

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.run import Run
    from accel_core.contract.unit import StepOutput, Unit
    from accel_core.contract.window import WindowSize


# -- forward and backward -----------------------------------------------------------------------------


def run_window(
    unit: Unit,
    batches: Iterable[Any],
    forward_loss: Callable[[nn.Module, Any], tuple[Tensor, Any]],
    *,
    microbatches: int | None,
    forward_only: bool,
    window_size: WindowSize | None,
) -> StepOutput:
    """Run forward and backward of a whole window by the hook `forward_backward` of the unit's strategy."""
    window, trained = unit.window, False
    if not forward_only:
        if unit.changes is not None:
            unit.changes.check()
        window.run_deferred_zero_grads()
    before = window.snapshot()
    try:
        window.begin_whole(window_size)
        observe = unit.run.observe_collective
        if observe is not None:
            observe("forward_backward", False)
        with torch.no_grad() if forward_only else nullcontext():
            output: StepOutput = unit.steps.forward_backward(
                unit, iter(batches), forward_loss, microbatches, forward_only
            )
        if observe is not None:
            observe("forward_backward", True)
        trained = not forward_only
    finally:
        if trained:  # as after the window's last `backward`: the gradients wait for a step
            unit.step_state.open(unit.optimizers, partial=False)
            window.end_whole()
        else:  # the call may stand inside another window of the program
            window.restore(before)
    return output


def backward(run: Run, loss: Tensor, unit: Unit | None, options: Mapping[str, Any]) -> None:
    """Compute the gradients of `loss` for the units it trains.

    Inside a window the loss is divided first: by the window's size, or by its items.

    Raises:
        AccelError: several strategies own the backward, or a model has changed since `prepare` in a way
            that its strategy cannot follow.
    """
    accumulation = run.accumulation
    trained: Sequence[Unit] = run.prepared.trained if accumulation is None else accumulation.trained
    units = trained if unit is None else (unit,)
    if run.world.size > 1:
        _check_ranks(run, units or run.units)
    owner = units[0] if len(units) == 1 else _owner(run, units)
    if accumulation is not None:
        units = (*units, *accumulation.extra_units)
        if owner is not None and (owner.window.size > 1 or owner.window.items is not None):
            loss = owner.window.part_of(loss)
    for each in units:
        if each.changes is not None and not each.step_state.phases:  # first backward of its window
            each.changes.check()
        each.window.note_backward()
        each.step_state.open(each.optimizers, partial=each.steps.no_sync is not None and _is_partial(each))
    observe = run.observe_collective
    if observe is not None:
        observe("backward", False)
    if owner is None or owner.steps.backward is None:
        loss.backward(**options)
    else:
        owner.steps.backward(owner, loss, owner.window.boundary, options)
    if observe is not None:
        observe("backward", True)
    for call in run.after_backward:
        call(units)


def _is_partial(unit: Unit) -> bool:
    """Return whether a backward now leaves gradients unreduced."""
    if unit.step_state.no_sync_depth:
        return True
    run = unit.run
    return run.accumulation is not None and not (
        unit.window.boundary or run.config.accumulation.sync_each_batch
    )


def _check_ranks(run: Run, units: Iterable[Unit]) -> None:
    """Raise AccelError if another rank has no batch for this backward, or no step would reduce gradients."""
    for unit in units:
        check_unit(run, unit, "backward", trains=True)
        if not unit.optimizers and run.topology.losses > 1:
            _refuse_unprepared(unit)


def _refuse_unprepared(unit: Unit) -> None:
    """Raise AccelError if gradients of a unit without optimizers stay unreduced or miss the optimizer."""
    trained = {name for name, each in unit.named_parameters().items() if each.requires_grad}
    if trained and trained <= unit.names.outlived():
        raise AccelError(
            f"backward: prepare has replaced the parameters of unit {unit.name!r}, and something still holds"
            " those from before, such as an optimizer that is not prepared: they get no gradients\n"
            "prepare the optimizer too: model, optimizer = accelerator.prepare(model, optimizer)"
        )
    is_in_window = unit.steps.no_sync is not None and not unit.step_state.no_sync_depth and _is_partial(unit)
    if trained and (is_in_window or unit.steps.reduce_gradients is not None):
        raise AccelError(
            f"backward: no prepared optimizer steps unit {unit.name!r}, and its gradients are reduced when"
            " one does: each rank would train a model of its own\n"
            "prepare the optimizer too: model, optimizer = accelerator.prepare(model, optimizer)"
        )


def _owner(run: Run, units: Sequence[Unit]) -> Unit | None:
    """Return the unit whose strategy runs the backward of a shared loss; None without units."""
    if not units:
        run.require_alive()
        return None
    owners = [unit for unit in units if unit.strategy_owns_backward]
    if len(owners) > 1:
        names = ", ".join(f"{unit.name} ({unit.strategy})" for unit in owners)
        raise AccelError(
            f"backward: the strategies of {len(owners)} units do their own backward: {names}\n"
            "say whose loss this is: accelerator.backward(loss, model=...)"
        )
    for unit in units:
        unit.step_state.share()  # only the user knows which units step
    return owners[0] if owners else units[0]


# -- at the boundary ----------------------------------------------------------------------------------


def finish(unit: Unit, optimizer: Optimizer | None = None) -> None:
    """Reduce and unscale the unit's gradients, unless an earlier clip, unscale or step has done so.

    Core does not see a loss's own `backward()`. Each call of clip, unscale and step then reduces again, which
    changes nothing: an average of averages is the average.

    Args:
        unit: the unit whose gradients are finished.
        optimizer: the optimizer that steps; None: all optimizers of the unit.

    Raises:
        AccelError: the strategy reduces in a backward that was not called.
    """
    state = unit.step_state
    if unit.changes is not None and not state.phases:  # a loss's own `backward()`
        unit.changes.check()
    phases = state.phases_of(optimizer)
    if Phase.PARTIAL in phases and not state.no_sync_depth and _reduces_in_backward(unit):
        raise AccelError(
            f"the gradients of unit {unit.name!r} are not reduced: its window ends here, and the last"
            " micro-batch, or the last outside no_sync, had no backward; each rank would train a model of"
            " its own\n"
            "call accelerator.backward in the last micro-batch too, or optimizer.zero_grad() to drop the"
            " window, on all ranks alike"
        )
    if phases == {Phase.FINISHED}:
        return
    if unit.steps.reduce_gradients is not None and not state.no_sync_depth:
        unit.steps.reduce_gradients(unit)
    if unit.steps.unscale is not None:
        for each in unit.optimizers:
            unit.steps.unscale(unit, each)
    state.finish()


def _reduces_in_backward(unit: Unit) -> bool:
    return unit.steps.no_sync is not None and unit.run.topology.losses > 1


def clip_norm(
    unit: Unit, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float
) -> Tensor | None:
    """Clip by norm at a window's boundary and return the norm; inside the window, return None."""
    if unit.window.awaits_backward:
        unit.window.note_backward()
    if not unit.window.boundary:
        return None
    if "partial_clips" not in unit.run.cards[unit.strategy].offers:  # no call in each step
        _check_whole(unit, parameters, norm_type)
    if unit.step_state.has_custom_step:
        finish(unit)
    clip = unit.steps.clip_gradients
    if clip is None:
        return clip_grad_norm_(parameters, max_norm, norm_type)
    norm: Tensor | None = clip(unit, parameters, max_norm, float(norm_type))  # torch accepts "inf" too
    return norm


def clip_value(unit: Unit, parameters: Sequence[nn.Parameter], value: float) -> None:
    """Clip by value at a window's boundary; do nothing inside it."""
    if not unit.window.boundary:
        return
    if "partial_clips" not in unit.run.cards[unit.strategy].offers:  # no call in each step
        _check_whole(unit, parameters)
    if unit.step_state.has_custom_step:
        finish(unit)
    unit.hooks.clip_gradients(unit, parameters, value, None)


def _check_whole(unit: Unit, parameters: Iterable[nn.Parameter], norm_type: float = 2) -> None:
    """Raise AccelError for norms other than the 2-norm, or if the optimizers train further parameters."""
    from accel_core.plugins.discovery import suggest_strategy

    if norm_type != 2:
        cause = f"by the 2-norm, not by norm_type={norm_type}"
    elif unit.names.trains_more_than(parameters):
        cause = f"all parameters of a unit together, and {unit.name!r} has more than were given"
    else:
        return
    raise AccelError(
        f"strategy {unit.strategy!r} clips {cause}\n"
        f"pass model.parameters() and no norm_type; or {suggest_strategy('partial_clips')}"
    )


def check_closure(unit: Unit) -> None:
    """Raise AccelError if the strategy takes no closure or the window has several micro-batches."""
    if "closures" not in unit.offers:
        from accel_core.plugins.discovery import suggest_strategy

        raise AccelError(
            f"optimizer.step(closure): strategy {unit.strategy!r} does not take a closure\n"
            f"use an optimizer that needs none; or {suggest_strategy('closures')}"
        )
    if unit.window.size > 1 and not (unit.window.boundary and unit.run.accumulation is None):
        raise AccelError(
            "optimizer.step(closure) computes gradients of its own, and this window has"
            f" {unit.window.size} micro-batches: it would step with the gradients of the last one only\n"
            "compute the whole batch in the closure, without accumulate, or take an optimizer without closure"
        )


def step(unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
    """Step the optimizer at a window's boundary; return False if the step was skipped (overflow)."""
    window, state, steps = unit.window, unit.step_state, unit.steps
    if window.awaits_backward or window.deferred_zero_grads:
        window.note_backward()
    if closure is not None:
        check_closure(unit)
    applied = True
    if not state.has_custom_step:
        optimizer.step() if closure is None else optimizer.step(closure)
    else:
        finish(unit, optimizer)
        applied = unit.hooks.optimizer_step(unit, optimizer, closure)
        if unit.changes is not None:
            unit.changes.note_step()
    state.phases.pop(optimizer, None)  # after the step: a closure computes gradients
    if steps.after_step is not None:
        steps.after_step(unit, optimizer, applied)
    run = unit.run
    run.trained_from.update(run.active_loaders)
    if run.mark_step is not None:
        run.mark_step("step")
    return applied
