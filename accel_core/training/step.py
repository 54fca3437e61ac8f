"""The order of a step, over a unit's bound hooks. Only this module counts micro-batches.

forward -> backward -> at the boundary: reduce -> unscale -> clip -> optimizer -> after -> zero
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_

from accel_core.data.uneven import check_unit
from accel_core.errors import AccelError

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit, UnitRun

__all__ = [
    "Accumulation",
    "backward",
    "clip_norm",
    "clip_value",
    "note_undivided",
    "quiet",
    "step",
    "unscale",
    "zero_grad",
]


class Accumulation:
    """The context of `accumulate(*models)`: one micro-batch of these units' windows.

    Made once for a set of models and entered each micro-batch; nests with others.
    items: how many the micro-batch has, where its loss is a sum over them; None: it is a mean.
    batch: what `step_context` is given; None: it is not entered.
    """

    def __init__(self, run: Run, units: Sequence[Unit], models: Sequence[nn.Module]) -> None:
        self.run = run
        self.units = tuple(units)
        self.trained = tuple(unit for unit in units if unit.optimizers) or self.units
        options = run.config.accumulation
        self._ends_with_loader = options.sync_with_dataloader
        self._windows = tuple(unit.window for unit in units)
        self._quiet = () if options.sync_each_batch else tuple(_quiet(self.units, models))
        self._surrounded = tuple(unit for unit in units if unit.steps.step_context is not None)
        simple = len(self._windows) == 1 and not self._quiet and not self._surrounded
        self._alone = self._windows[0] if simple else None
        self.items: Tensor | float | None = None
        self.batch: Any = None
        self._outer: Accumulation | None = None
        self._entered = False
        """Only so that a second `__exit__` is noticed: `run.accumulation` is the one that counts."""
        self._contexts: ExitStack | None = None
        self._silence: ExitStack | None = None

    def __enter__(self) -> None:
        run, items = self.run, self.items
        if run.accumulation is not None:
            self._end_others()
        active = run.active_loaders
        last = bool(active) and self._ends_with_loader and active[-1].last
        self._outer, run.accumulation, self._entered = run.accumulation, self, True
        try:
            if self._alone is not None:
                self._alone.enter(last, items)
            else:
                self._enter_all(last, items)
            if items is not None:
                for unit in self.units:
                    unit.finishes = True  # from now on: a step at least divides by the items
            if self._windows:
                run.windows = self._windows
        except BaseException:  # a plugin's, of any kind, or Ctrl-C: this micro-batch was not entered
            self.drop()
            raise

    def _end_others(self) -> None:
        """End those of the same units: Ctrl-C has kept one from ending, or its `__exit__` will complain."""
        found, shared = self.run.accumulation, None
        while found is not None:
            if found is self or not set(found.units).isdisjoint(self.units):
                shared = found
            found = found._outer
        while shared is not None and (inner := self.run.accumulation) is not None:
            inner._entered = False
            inner.drop()
            if inner is shared:
                return

    def _enter_all(self, last: bool, items: Tensor | float | None) -> None:
        before = [window.snapshot() for window in self._windows]
        try:
            for window in self._windows:
                window.enter(last, items)
            if self._quiet or self._surrounded:
                self._surround()
        except BaseException:
            for window, state in zip(self._windows, before, strict=True):
                window.restore(state)
            raise

    def _surround(self) -> None:
        self._end_contexts()  # that Ctrl-C has left
        self._contexts = contexts = ExitStack()
        contexts.callback(self._end_silence)
        self.follow_windows()
        for unit in self._surrounded if self.batch is not None else ():
            contexts.enter_context(unit.steps.step_context(unit, self.batch))

    def follow_windows(self) -> None:
        """Have each unit reduce gradients if this micro-batch is its window's last, else not."""
        self._end_silence()
        self._silence = silence = ExitStack()
        for unit, models in self._quiet:
            if not unit.window.boundary:
                silence.enter_context(unit.steps.no_sync(unit, models))

    def _end_silence(self) -> None:
        if self._silence is not None:
            self._silence.close()
            self._silence = None

    def _end_contexts(self, *error: Any) -> None:
        if self._contexts is not None:
            self._contexts.__exit__(*error or (None, None, None))
            self._contexts = None

    def drop(self) -> None:
        """Be entered no more, without a word to windows and contexts of what happened inside."""
        self.run.accumulation, self.batch = self._outer, None
        if self._outer is not None:
            self.run.windows = self._outer._windows
        self._end_contexts()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered, outer, self._entered = self._entered, self._outer, False
        self.run.accumulation, self.batch = outer, None
        if outer is not None:
            self.run.windows = outer._windows
        try:
            for window in self._windows:
                window.ran()
        finally:
            if self._contexts is not None:
                self._end_contexts(kind, error, trace)
        if not entered and kind is None:
            raise AccelError(
                "accumulate was entered within accumulate of the same models: both were counted\n"
                "enter it once a micro-batch"
            )


def _quiet(units: Sequence[Unit], models: Sequence[nn.Module]) -> list[tuple[Unit, list[nn.Module]]]:
    return [
        (unit, [wrapped for wrapped in unit.wrapped if wrapped in models] or unit.wrapped)
        for unit in units
        if unit.steps.no_sync is not None
    ]


@contextmanager
def quiet(unit: Unit, models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, these models of the unit do not reduce gradients."""
    with ExitStack() as stack:
        if unit.steps.no_sync is not None:
            stack.enter_context(unit.steps.no_sync(unit, models))
        unit.silent += 1
        try:
            yield
        finally:
            unit.silent -= 1


def backward(run: Run, loss: Tensor, unit: Unit | None, options: Mapping[str, Any]) -> None:
    """Gradients of `loss` for the units it trains.

    Inside a window a mean is divided by the window's size; a sum over items waits for the boundary.

    Raises:
        AccelError: nothing requires a gradient, or several strategies want to do it.
    """
    accumulation = run.accumulation
    trained: Sequence[Unit] = run.trained if accumulation is None else accumulation.trained
    units = trained if unit is None else (unit,)
    if run.world.size > 1:
        for each in units:
            check_unit(run, each, trains=True)
    doing = units[0] if len(units) == 1 else _one_of(run, units)
    if doing is not None and accumulation is not None and (window := doing.window).size != 1:
        loss = loss / window.size if window.items is None else loss
    if len(units) == 1:
        units[0].waiting.update(units[0].optimizers)
    for each in units:
        each.window.ran()
        if each.finishes:
            each.reduced.clear()
            each.unscaled.clear()  # of a window that ended without a step
            if accumulation is None:
                each.window.drop_items()
    try:
        if doing is None or doing.steps.backward is None:
            loss.backward(**options)
        else:
            doing.steps.backward(doing, loss, doing.window.boundary, options)
    except RuntimeError as error:
        _explain(run, loss, error)
        raise
    if accumulation is not None and accumulation.items is not None:
        note_undivided(units)
    if run.mark_step is not None:
        run.mark_step("backward")


def _explain(run: Run, loss: Tensor, error: RuntimeError) -> None:
    """Raise instead of torch's own error where ours says more."""
    if not loss.requires_grad:
        raise AccelError(
            "backward: the loss does not require a gradient; it was computed under no_grad, detached, or from"
            " frozen parameters only\ncompute it from a prepared model's output, outside torch.no_grad()"
        ) from error
    _tell_lost(run, "backward", error)


def _tell_lost(run: UnitRun, operation: str, error: RuntimeError) -> None:
    lost = run.lost_peer(operation, error)
    if lost is not None:
        raise lost from error


def _one_of(run: Run, units: Sequence[Unit]) -> Unit | None:
    """The unit whose strategy does the backward of a loss that several units share; None of none."""
    if not units:
        run.require_alive()
        return None
    owners = [unit for unit in units if unit.backward_is_strategys]
    if len(owners) > 1:
        names = ", ".join(f"{unit.name} ({unit.strategy})" for unit in owners)
        raise AccelError(
            f"backward: the strategies of {len(owners)} units do their own backward: {names}\n"
            "say whose loss this is: accelerator.backward(loss, model=...)"
        )
    for unit in units[1:]:
        unit.scaler = units[0].scaler  # one loss has one scale
    return owners[0] if owners else units[0]


def unscale(unit: Unit) -> None:
    """Reduce and unscale the unit's gradients, once a window."""
    if unit.finishes:
        _reduce(unit)
        if unit.steps.unscale is not None:
            for optimizer in unit.optimizers:
                if optimizer not in unit.unscaled:
                    unit.unscaled.add(optimizer)
                    unit.steps.unscale(unit, optimizer)


def _reduce(unit: Unit, optimizer: Optimizer | None = None) -> None:
    """Reduce once a window; again before a step of an optimizer that has applied what was reduced.

    A loop that calls the loss's own backward says nothing of a new window. With one optimizer it steps once
    in each; of several, one may have been left out: its gradients are looked at.
    """
    if _is_reduced(unit, optimizer):
        return
    unit.unscaled.clear()
    if unit.window.items is not None:
        _refuse_edited(unit)
        unit.hooks.reduce_gradients(unit, _of_all(unit.run, unit.window.items))
    elif unit.steps.reduce_gradients is not None:
        unit.steps.reduce_gradients(unit, None)
    by_hand = len(unit.optimizers) > 1 and not unit.waiting
    unit.reduced = {each: _held(each) if by_hand else None for each in unit.optimizers} or {None: None}


def _is_reduced(unit: Unit, optimizer: Optimizer | None) -> bool:
    asked = [*unit.reduced] if optimizer is None else [optimizer]
    return bool(asked) and all(
        each in unit.reduced and unit.reduced[each] in (None, each and _held(each)) for each in asked
    )


def _look_again(unit: Unit) -> None:
    """Note gradients that were changed since they were reduced as those that were reduced."""
    for each, held in unit.reduced.items():
        if held is not None and each is not None:
            unit.reduced[each] = _held(each)


def _held(optimizer: Optimizer) -> list[tuple[int, int] | None]:
    return _versions(parameter for group in optimizer.param_groups for parameter in group["params"])


def note_undivided(units: Iterable[Unit]) -> None:
    """Remember the gradients of windows that count items, as they are after a backward at the boundary."""
    for unit in units:
        if unit.window.boundary:
            unit.undivided = unit.window.number, _versions(unit.named_parameters().values())


def _versions(parameters: Iterable[nn.Parameter]) -> list[tuple[int, int] | None]:
    gradients = [parameter.grad for parameter in parameters]
    return [None if each is None else (id(each), each._version) for each in gradients]


def _refuse_edited(unit: Unit) -> None:
    noted, unit.undivided = unit.undivided, None
    if noted is None or noted[0] != unit.window.number:
        return
    parameters = unit.named_parameters()
    found = dict(zip(parameters, _versions(parameters.values()), strict=True))
    edited = [name for (name, now), before in zip(found.items(), noted[1], strict=True) if now != before]
    if edited:
        raise AccelError(
            f"accumulate(items=...): the gradient of {edited[0]} was changed after backward, where gradients"
            " are still sums, yet to be divided by the items of the window\n"
            "call accelerator.unscale_gradients() before changing them: it divides; or clip_grad_norm_ of"
            " the accelerator, to clip"
        )


def _of_all(run: UnitRun, items: Tensor | float) -> Tensor:
    """The items of all ranks. Those with the same loss count once: hence a mean, not a sum."""
    dtype = torch.float64 if "float64" in run.stack.device.card.offers else torch.float32  # counts are exact
    if isinstance(items, torch.Tensor):
        mine = items.detach().to(run.device, dtype, non_blocking=True, copy=True)
    else:
        mine = torch.full((), items, dtype=dtype, device=run.device)
    total: Tensor = run.collectives("world").all_reduce(mine, "mean") * run.topology.losses
    return total


def clip_norm(
    unit: Unit, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float
) -> Tensor | None:
    """Clip at a window's boundary; None inside it, where gradients are partial."""
    unit.window.ran()
    if not unit.window.boundary:
        return None
    clip, norm = unit.steps.clip_grad_norm, None
    try:
        if unit.finishes:
            unscale(unit)
        if clip is None:
            norm = clip_grad_norm_(parameters, max_norm, norm_type)
        else:
            norm = clip(unit, parameters, max_norm, norm_type)
    except RuntimeError as error:
        _tell_lost(unit.run, "clip_grad_norm_", error)
        raise
    _look_again(unit)
    return norm


def clip_value(unit: Unit, parameters: Sequence[nn.Parameter], value: float) -> None:
    """Clamp at a window's boundary; nothing inside it."""
    if unit.window.boundary:
        unscale(unit)
        unit.hooks.clip_grad_value(unit, parameters, value)
        _look_again(unit)


def step(unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
    """Apply the optimizer, at a window's boundary; whether it was applied."""
    unit.window.ran()
    if closure is not None and unit.window.size > 1 and unit.run.accumulation is not None:
        raise AccelError(
            f"optimizer.step(closure) computes gradients of its own, and this window has {unit.window.size}"
            " micro-batches: it would step with the last one's alone\n"
            "give it the whole batch without accumulate, or an optimizer that needs no closure"
        )
    if not unit.finishes:
        optimizer.step() if closure is None else optimizer.step(closure)
        unit.waiting.discard(optimizer)  # last: a closure computes gradients
        return True
    steps = unit.steps
    try:
        _reduce(unit, optimizer)
        applied: bool = unit.hooks.optimizer_step(unit, optimizer, closure)
    except RuntimeError as error:
        _tell_lost(unit.run, "step", error)
        raise
    unit.waiting.discard(optimizer)
    unit.reduced.pop(optimizer, None)
    unit.unscaled.add(optimizer)  # a scaler unscales what it steps
    if steps.after_step is not None:
        steps.after_step(unit, optimizer, applied)
    if unit.run.mark_step is not None:
        unit.run.mark_step("step")
    return applied


def zero_grad(unit: Unit, optimizer: Optimizer, set_to_none: bool, cleared: int) -> int:
    """Clear gradients, unless a window has gradients of earlier micro-batches still to apply.

    So `zero_grad` may stand before the forward or after the step: both mean the same. `cleared` is what
    the optimizer's last call gave; `Window` has the table.
    """
    window = unit.window.cleared(cleared)
    if not window:
        return cleared
    unit.waiting.discard(optimizer)
    unit.reduced.pop(optimizer, None)
    if unit.steps.zero_grad is None:
        optimizer.zero_grad(set_to_none)
    else:
        unit.steps.zero_grad(unit, optimizer, set_to_none)
    return window
