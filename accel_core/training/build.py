"""The build of a unit: its objects are transformed, placed, wrapped and rebound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import TYPE_CHECKING, Any

from accel_core.contract.hooks import PHASES
from accel_core.distributed.progress import show_progress
from accel_core.distributed.streams import fork
from accel_core.errors import AccelError
from accel_core.training.autocast import attach_contexts
from accel_core.training.changes import Changes
from accel_core.training.proxies import PreparedOptimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.unit import Unit
    from accel_core.training.plan import PreparePlan, UnitGroup
    from accel_core.training.prepared import PreparedObjects


def build_unit(group: UnitGroup, plan: PreparePlan, prepared: PreparedObjects) -> None:
    """Add the group's objects to its unit, and the unit to the prepared objects. Collective.

    If it raises, the unit is as it was before; changes that plugins made to the objects themselves stay.
    """
    unit = group.unit
    models = " and ".join(type(model).__name__ for model in group.models)
    with show_progress(f"preparing {models} for {unit.strategy}"), _undone_on_error(unit):
        if group.models:
            unit.use_stream(fork(unit))
            unit.add_models(group.models)
        unit.optimizers.extend(group.optimizers)
        param_groups = [each for optimizer in group.optimizers for each in optimizer.param_groups]
        trained = [unit.names.of(parameter) for each in param_groups for parameter in each["params"]]
        if unit.hooks.step("prepare_unit") is None:
            _build(group, plan)
        else:
            _build_whole(group, plan)
        unit.names.end(trained)
        if unit.scaler is None and group.models:
            unit.use_scaler(unit.hooks.grad_scaler(unit))
    inner = _last(unit.optimizers, len(group.optimizers))
    proxies = [PreparedOptimizer(optimizer, unit) for optimizer in inner]
    prepared.add_unit(unit, zip(group.optimizers, proxies, strict=True))
    unit.use_changes(Changes(unit))
    _warn_of_left_out(unit)


@contextmanager
def _undone_on_error(unit: Unit) -> Iterator[None]:
    """Restore the unit if the block raises."""
    attached, config = len(unit.detach), unit.config
    lists: tuple[list[Any], ...] = unit.given, unit.models, unit.wrapped, unit.optimizers, unit.schedulers
    before = [[*each] for each in lists]
    try:
        yield
    except BaseException:  # a plugin may raise anything
        while len(unit.detach) > attached:
            unit.detach.pop()()
        for each, held in zip(lists, before, strict=True):
            each[:] = held
        unit.use_config(config)
        unit.use_build(None)
        raise


def _warn_of_left_out(unit: Unit) -> None:
    """Warn about parameters that require gradients and are in no optimizer."""
    named = unit.named_parameters().items() if unit.optimizers else ()
    left = [name for name, each in named if each.requires_grad and name not in unit.names.trained]
    if not left:
        return
    from accel_core.distributed.logging import get_logger  # late: few runs need it

    get_logger(__name__).warning(
        "prepare: %d parameter(s) of unit %s train and are in no optimizer (%s): their gradients are"
        " computed, count when gradients are clipped, and are applied by nobody; freeze them by"
        " requires_grad_(False), or give them to an optimizer before prepare",
        *(len(left), unit.name, ", ".join(left[:3]) + (" and more" if len(left) > 3 else "")),
    )


def _build(group: UnitGroup, plan: PreparePlan) -> None:
    """Wrap each model and each optimizer on its own."""
    unit, put_back = group.unit, _capture_states(group)
    for number in range(len(group.models)):
        _wrap(unit, plan, number, _transform(unit, unit.given[number]))
    for optimizer in group.optimizers:
        _take_in(unit, optimizer, put_back.get(optimizer))


def _build_whole(group: UnitGroup, plan: PreparePlan) -> None:
    """Build through `prepare_unit`: a plugin makes one engine of all objects, or has the base wrap each."""
    unit, numbers = group.unit, range(len(group.models))
    first, added = len(unit.schedulers), plan.schedulers_of(unit.optimizers)
    unit.schedulers.extend(added)
    models = [_transform(unit, unit.given[number]) for number in numbers]
    for number in numbers:
        unit.names.replace(number, models[number])
    for optimizer in group.optimizers:
        _rebind(unit, optimizer)

    def build_each() -> None:
        put_back = _capture_states(group)
        unit.use_build(None)
        unit.names.update()  # transforms may have replaced parameters, and wrapping may again
        for number in numbers:
            _wrap(unit, plan, number, models[number])
        for optimizer in group.optimizers:
            _take_in(unit, optimizer, put_back.get(optimizer))

    unit.use_build(build_each)
    unit.hooks.prepare_unit(unit, plan.of_kind["dataloader"])
    is_built = unit.build_each is None  # `build_each` ran: the plugin left the wrapping to the base
    plan.engine_schedulers.update(zip(map(id, added), unit.schedulers[first:], strict=False))
    if is_built:
        return
    unit.use_build(None)
    _check_transformed(unit, _last(unit.optimizers, len(group.optimizers)))
    for number in numbers:
        _finish_model(unit, number)


def _capture_states(group: UnitGroup) -> Mapping[Optimizer, Callable[[], None]]:
    """Return functions that put the state of new optimizers back once the models are wrapped."""
    stateful = [optimizer for optimizer in group.optimizers if optimizer.state and group.models]
    if not stateful:
        return {}
    from accel_core.training.prior_state import capture_optimizer_state  # late: few optimizers have state

    return {optimizer: capture_optimizer_state(group.unit, optimizer) for optimizer in stateful}


def _wrap(unit: Unit, plan: PreparePlan, number: int, model: nn.Module) -> None:
    if plan.placed.get(id(unit.given[number]), True):
        model = unit.hooks.place_model(unit, model, unit.run.device)
    unit.wrapped.append(unit.hooks.wrap_model(unit, model))
    _finish_model(unit, number)


def _take_in(unit: Unit, optimizer: Optimizer, put_back: Callable[[], None] | None) -> None:
    _rebind(unit, optimizer, put_back)
    unit.optimizers[unit.optimizers.index(optimizer)] = unit.hooks.wrap_optimizer(unit, optimizer)


def _last(optimizers: Sequence[Optimizer], count: int) -> Sequence[Optimizer]:
    return optimizers[len(optimizers) - count :]


def _check_transformed(unit: Unit, optimizers: Sequence[Optimizer]) -> None:
    """Raise AccelError if a plugin replaces an optimizer that an engine steps."""
    for optimizer in optimizers:
        if unit.hooks.wrap_optimizer(unit, optimizer) is not optimizer:
            plugins = " and ".join(one.plugin for one in unit.hooks.implementations("wrap_optimizer"))
            raise AccelError(
                f"prepare: {plugins} would wrap the {type(optimizer).__name__}, which strategy"
                f" {unit.strategy!r} steps itself\nleave {plugins} out, or choose another strategy"
            )


def _transform(unit: Unit, model: nn.Module) -> nn.Module:
    for phase in PHASES[:-1]:
        model = unit.hooks.transform_model(unit, model, phase)
    return model


def _finish_model(unit: Unit, number: int) -> None:
    """Finish a wrapped model: run the last transform phase, update its names, attach autocast."""
    hooks = unit.hooks
    unit.wrapped[number] = wrapped = hooks.transform_model(unit, unit.wrapped[number], PHASES[-1])
    unit.names.replace(number, hooks.unwrap_model(unit, wrapped, True))
    attach_contexts(unit, unit.models[number])


def _rebind(unit: Unit, optimizer: Optimizer, put_back: Callable[[], None] | None = None) -> None:
    """Give the optimizer the parameters that replaced its original ones.

    Args:
        unit: the optimizer's unit.
        optimizer: the user's optimizer.
        put_back: restores the optimizer's state for the new parameters (see `capture_optimizer_state`).
    """
    now = dict(unit.names.all())
    for group in optimizer.param_groups:
        names = [unit.names.of(each) or _given_by_transform(now, each) for each in group["params"]]
        if lost := [name for name in names if name not in now]:
            raise AccelError(
                f"prepare: the {type(optimizer).__name__} holds {lost[0]}, which a transform of its model has"
                " taken away\nmake the optimizer from the prepared model's parameters"
            )
        if any(map(is_not, map(now.get, names), group["params"])):
            if optimizer.state and put_back is None:
                raise AccelError(
                    f"prepare: the {type(optimizer).__name__} already has state, and preparing its model"
                    " replaced the parameters\nprepare both in one call"
                )
            group["params"] = [now[name] for name in names]
    if put_back is not None:
        put_back()


def _given_by_transform(now: Mapping[str, nn.Parameter], parameter: nn.Parameter) -> str:
    """Return the name of a parameter that a transform has put into both the model and the optimizer."""
    return next((name for name, each in now.items() if each is parameter), "a parameter of no model")
