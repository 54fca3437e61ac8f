"""The order of a step, over a unit's bound hooks.

forward -> backward -> at the boundary: reduce -> unscale -> clip -> optimizer -> after -> zero
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch.nn.utils import clip_grad_norm_

from accel_core.data.uneven import check_unit, refuse_items
from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.run import Run
    from accel_core.contract.unit import StepOutput, Unit, UnitRun
    from accel_core.training.step_state import Reduced


@contextmanager
def quiet(unit: Unit, models: Sequence[nn.Module]) -> Iterator[None]:
    """Keep these models of the unit from reducing gradients."""
    no_sync = nullcontext() if unit.steps.no_sync is None else unit.steps.no_sync(unit, models)
    with no_sync, unit.step_state.no_sync():
        yield


# -- forward and backward -----------------------------------------------------------------------------


def run_window(
    unit: Unit,
    batches: Iterable[Any],
    forward_loss: Callable[[nn.Module, Any], tuple[Tensor, Any]],
    *,
    microbatches: int | None,
    forward_only: bool,
    items: Tensor | float | None,
) -> StepOutput:
    """Run forward and backward of one window as a whole, by the unit's strategy."""
    window, state, trained = unit.window, unit.step_state, False
    if items is not None and not forward_only:
        refuse_items([unit])
    if not forward_only:
        window.clear_put_off()
    before = window.snapshot()
    try:
        window.begin_whole(items)
        if items is not None and not forward_only:
            state.expect_items(unit)
        with torch.no_grad() if forward_only else nullcontext():
            output: StepOutput = unit.steps.forward_backward(
                unit, iter(batches), forward_loss, microbatches, forward_only
            )
        trained = not forward_only
    except RuntimeError as error:
        tell_lost(unit.run, "forward_backward", error)
        raise
    finally:
        if trained:  # as after the window's last `backward`: its gradients wait for a step
            window.end_whole()
        else:  # maybe in the midst of a window
            window.restore(before)
    if trained:
        state.begin_window()
        state.with_gradients.update(unit.optimizers)
        if items is not None:
            _note_undivided([unit])
    return output


def backward(run: Run, loss: Tensor, unit: Unit | None, options: Mapping[str, Any]) -> None:
    """Compute the gradients of `loss` for the units it trains.

    Inside a window a mean is divided by the window's size; a sum over items is divided at the boundary.

    Raises:
        AccelError: nothing requires a gradient, or several strategies own the backward.
    """
    accumulation = run.accumulation
    trained: Sequence[Unit] = run.prepared.trained if accumulation is None else accumulation.trained
    units = trained if unit is None else (unit,)
    if run.world.size > 1:
        _check_batches(run, units)
    owner: Unit | None
    if len(units) == 1:
        (owner,) = units
        owner.step_state.with_gradients.update(owner.optimizers)
    else:
        owner = _owner(run, units)
    if accumulation is not None and owner is not None and owner.window.size != 1:
        loss, options = _mean(owner, loss, options)
    units = units if accumulation is None or not accumulation.beside else (*units, *accumulation.beside)
    reduced = None
    for loss_unit in units:
        loss_unit.window.note_backward()
        if loss_unit.step_state.needs_finish:
            reduced = _begin_windows(units, outside=accumulation is None)
            break
    try:
        if owner is None or owner.steps.backward is None:
            loss.backward(**options)
        else:
            owner.steps.backward(owner, loss, owner.window.boundary, options)
    except RuntimeError as error:
        _explain(run, loss, error)
        raise
    if reduced:
        _keep_reduced(reduced)
    if accumulation is not None and accumulation.items is not None:
        _note_undivided(units)
    for call in run.after_backward:
        call(units)


def _mean(unit: Unit, loss: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Mapping[str, Any]]:
    """Return loss and options for a backward of the window's mean.

    That is `loss` divided by the window's micro-batches; sums over items are divided at the boundary. A loss
    of torch's own is given the gradient that it has in the division, to the bit, which saves two kernels.
    """
    if unit.window.items is not None:
        return loss, options
    if (
        type(loss) is torch.Tensor
        and torch.Tensor.backward is _BACKWARD
        and "backward" not in loss.__dict__
        and loss.dtype in _MEAN_DTYPES
        and loss.numel() == 1
        and not (options or loss.is_nested or unit.steps.backward)
    ):
        return loss, {"gradient": torch.full_like(loss, 1 / unit.window.size)}
    return loss / unit.window.size, options


def torchs_own(function: Any) -> Any:
    """Return the function, or None if it, or what wraps it, is not of torch."""
    inner = function
    while inner is not None:
        if getattr(inner, "__globals__", {}).get("__name__", "").partition(".")[0] != "torch":
            return None
        inner = getattr(inner, "__wrapped__", None)
    return function


_BACKWARD: Final = torchs_own(torch.Tensor.backward)
_MEAN_DTYPES: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def _begin_windows(units: Sequence[Unit], *, outside: bool) -> list[tuple[Unit, Reduced]]:
    """Have gradients of these units reduced anew.

    Returns those that are reduced now. outside: of any window.
    """
    reduced = []
    for unit in units:
        unit.window.note_backward()
        state = unit.step_state
        if state.needs_finish:
            if state.reduced:
                reduced.append((unit, state.reduced_gradients()))
            state.begin_window()
            if state.counted_in and (outside or (unit.window.items is None and unit.window.index <= 0)):
                state.forget_items(unit)
            if unit.window.items is not None and not outside and len(state.counted_in) < len(unit.optimizers):
                state.count(unit)
            if outside:
                unit.window.drop_items()
    return reduced


def _check_batches(run: Run, units: Iterable[Unit]) -> None:
    """Raise where another rank has no batch for this backward."""
    for unit in units:
        check_unit(run, unit, "backward", trains=True)


def _explain(run: Run, loss: Tensor, error: RuntimeError) -> None:
    """Raise an error of ours instead of torch's where it says more."""
    if not loss.requires_grad:
        raise AccelError(
            "backward: the loss does not require a gradient; it was computed under no_grad, detached, or from"
            " frozen parameters only\ncompute it from a prepared model's output, outside torch.no_grad()"
        ) from error
    tell_lost(run, "backward", error)


def tell_lost(run: UnitRun, operation: str, error: RuntimeError) -> None:
    """Raise CollectiveError with the lost ranks, if torch's error says that some are."""
    lost = run.lost_peer(operation, error)
    if lost is not None:
        raise lost from error


def _owner(run: Run, units: Sequence[Unit]) -> Unit | None:
    """Return the unit that does the backward of a shared loss; None without units."""
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
    for unit in units[1:]:
        unit.use_scaler(units[0].scaler)  # one loss has one scale
    for unit in units:
        unit.step_state.sharing.update(unit.optimizers)
    return owners[0] if owners else units[0]


# -- at the boundary ----------------------------------------------------------------------------------


def unscale(unit: Unit) -> None:
    """Reduce and unscale the unit's gradients, where they are not yet."""
    if unit.step_state.needs_finish:
        _reduce(unit)
        if unit.steps.unscale is not None:
            for optimizer in unit.optimizers:
                unit.steps.unscale(unit, optimizer)


def _reduce(unit: Unit, optimizer: Optimizer | None = None) -> None:
    """Reduce gradients that are not reduced yet.

    That is once per window, and again before a step of an optimizer that has applied the reduced ones. A loop
    that calls the loss's own backward never announces a new window. With one optimizer each step is a window;
    of several optimizers one may have been left out, so its gradients are compared.
    """
    state = unit.step_state
    if state.has_scaled and unit.optimizers:
        from accel_core.training.unprepared import refuse_scaled  # late: few runs need it

        refuse_scaled(unit, optimizer)
    if state.is_reduced(optimizer, unit.window):
        return
    state.refuse_carried(unit.window)
    if unit.window.items is not None and unit.run.accumulation is None and state.is_settled(unit):
        unit.window.drop_items()  # a backward of the loss's own came after its window
    if unit.window.items is not None:
        state.refuse_edited(unit.window, unit.named_parameters(), optimizer)
        items = state.note_items(_items_of_all_ranks(unit, unit.window.items))
        unit.hooks.reduce_gradients(unit, items)
    elif unit.steps.reduce_gradients is not None:
        unit.steps.reduce_gradients(unit, None)
    state.note_reduced(unit.optimizers)


def _keep_reduced(reduced: Iterable[tuple[Unit, Reduced]]) -> None:
    """Count as reduced, after a backward, the gradients that it has left alone."""
    for unit, before in reduced:
        unit.step_state.keep_reduced(before, unit.window)


def _note_undivided(units: Iterable[Unit]) -> None:
    """Note gradients of windows that count items, after a backward at the boundary."""
    for unit in units:
        if unit.window.boundary:
            unit.step_state.note_undivided(unit.window, unit.named_parameters().values())


def _items_of_all_ranks(unit: Unit, items: Tensor | float) -> Tensor:
    """Return all ranks' items; ranks with the same loss count once."""
    run, before = unit.run, unit.step_state.items
    dtype = _counted_in(unit) if before is None else before.dtype
    if isinstance(items, torch.Tensor):
        count = items.detach().to(run.device, dtype, non_blocking=True, copy=True)
    else:
        count = torch.full((), items, dtype=dtype, device=run.device)
    total: Tensor = run.collectives("world").all_reduce(count, "mean") * run.topology.losses
    return total


def _counted_in(unit: Unit) -> torch.dtype:
    """Return the dtype that all ranks count items in. Collective.

    Counts are exact. Of the chips that a card is for, some may lack float64, and a world may have both.
    """
    run = unit.run
    able = float("float64" in unit.hooks.capabilities(run.device))
    of_all = run.collectives("world").all_reduce(torch.full((), able, device=run.device), "min")
    if run.mark_step is not None:
        run.mark_step("host_read")
    return torch.float64 if of_all.item() else torch.float32


def clip_norm(
    unit: Unit, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float
) -> Tensor | None:
    """Clip at a window's boundary; do nothing inside it, where gradients are partial."""
    if unit.window.awaits_backward:
        unit.window.note_backward()
    if not unit.window.boundary:
        return None
    # torch takes a tensor too, whose device is not waited for.
    try:
        is_norm = isinstance(max_norm, torch.Tensor) or max_norm >= 0  # type: ignore[redundant-expr]
    except TypeError:  # None, text, a list: what has no order beside a number
        is_norm = False
    if not is_norm:
        raise AccelError(
            f"clip_grad_norm_: max_norm is {max_norm!r}, and no norm that gradients can have\n"
            "give 0 or more; inf clips nothing"
        )
    if norm_type != norm_type:  # noqa: PLR0124  true of nan, and no call in each step
        raise AccelError(
            "clip_grad_norm_: norm_type is nan, which would make all gradients NaN\n"
            "give 2, any other p, or inf"
        )
    clip, norm = unit.steps.clip_grad_norm, None
    try:
        if unit.step_state.needs_finish:
            unscale(unit)
        if clip is None:
            norm = clip_grad_norm_(parameters, max_norm, norm_type)
        else:
            norm = clip(unit, parameters, max_norm, float(norm_type))  # torch takes text too
    except RuntimeError as error:
        tell_lost(unit.run, "clip_grad_norm_", error)
        raise
    if unit.step_state.reduced:
        unit.step_state.note_edited()
    return norm


def clip_value(unit: Unit, parameters: Sequence[nn.Parameter], value: float) -> None:
    """Clamp at a window's boundary; do nothing inside it."""
    if not unit.window.boundary:
        return
    try:
        is_bound = value >= 0
    except TypeError:  # None, text, a list: what has no order beside a number
        is_bound = False
    if not is_bound:
        raise AccelError(
            f"clip_grad_value_: clip_value is {value!r}, and no bound of gradients\n"
            "give 0 or more; inf clamps nothing"
        )
    try:
        unscale(unit)
        unit.hooks.clip_grad_value(unit, parameters, value)
    except RuntimeError as error:
        tell_lost(unit.run, "clip_grad_value_", error)
        raise
    unit.step_state.note_edited()


def refuse_closure(unit: Unit) -> NoReturn:
    """Raise AccelError for a closure in a window of micro-batches, or of items."""
    if unit.window.items is not None:
        raise AccelError(
            "accumulate(items=...): optimizer.step(closure) computes gradients of its own, which nothing"
            " divides by the items of the window\n"
            "leave items out, and divide the loss in the closure; or take an optimizer without closure"
        )
    raise AccelError(
        f"optimizer.step(closure) computes gradients of its own, and this window has {unit.window.size}"
        " micro-batches: it would step with the gradients of the last one only\n"
        "compute the whole batch in the closure, without accumulate, or take an optimizer without closure"
    )


def step(unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
    """Apply the optimizer, at a window's boundary; return whether it was applied."""
    if unit.window.awaits_backward or unit.window.put_off:
        unit.window.note_backward()
    if (
        closure is not None
        and unit.run.accumulation is not None
        and (unit.window.size > 1 or unit.window.items is not None)
    ):
        refuse_closure(unit)
    state = unit.step_state
    if not state.needs_finish:
        optimizer.step() if closure is None else optimizer.step(closure)
        state.with_gradients.discard(optimizer)  # last: a closure computes gradients
        return True
    try:
        _reduce(unit, optimizer)
        applied: bool = unit.hooks.optimizer_step(unit, optimizer, closure)
    except RuntimeError as error:
        tell_lost(unit.run, "step", error)
        raise
    state.drop(optimizer)
    if unit.steps.after_step is not None:
        unit.steps.after_step(unit, optimizer, applied)
    if unit.run.mark_step is not None:
        unit.run.mark_step("step")
    return applied
