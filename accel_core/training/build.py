"""The build of a unit: its objects are transformed, placed, wrapped and rebound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accel_core.contract.hooks import PHASES
from accel_core.distributed.progress import show_progress
from accel_core.distributed.streams import fork, forward_context
from accel_core.errors import AccelError
from accel_core.training.autocast import attach
from accel_core.training.gradients import attach_gradient_transforms
from accel_core.training.prior_state import carry

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.unit import PartName, Unit
    from accel_core.training.plan import PreparePlan, UnitGroup


def build_unit(unit: Unit, group: UnitGroup, plan: PreparePlan) -> list[Optimizer]:
    """Take the group's objects into the unit; return its new optimizers, wrapped.

    A unit that cannot be built is left as it was before.
    """
    models = " and ".join(type(model).__name__ for model in group.models)
    with _all_or_nothing(unit, group), show_progress(f"preparing {models} for {unit.strategy}"):
        _build(unit, group, plan)
    return unit.optimizers[len(unit.optimizers) - len(group.optimizers) :]


@contextmanager
def _all_or_nothing(unit: Unit, group: UnitGroup) -> Iterator[None]:
    before, parameters = unit.snapshot(), unit.run.parameters.snapshot()
    attached = {id(detach) for other in (unit, *group.units) for detach in other.detach}
    try:
        yield
    except BaseException:  # a plugin may raise anything
        for detach in unit.detach:  # units that were to join keep their own
            if id(detach) not in attached:
                detach()
        unit.restore(before)
        unit.run.parameters.restore(parameters)
        raise


def _build(unit: Unit, group: UnitGroup, plan: PreparePlan) -> None:
    hooks, parameters = unit.hooks, unit.run.parameters
    for other in group.units[1:]:
        unit.merge(other)
    before = unit.add_models(group.models)
    original = dict(unit.all_names())
    unit.optimizers.extend(group.optimizers)
    if hooks.step("prepare_unit") is not None:
        parameters.add(unit, original.items())
        _build_whole(unit, group, plan, before)
    else:
        unit.configure(hooks.complete(unit.run.configs[unit.strategy], unit, plan.of_kind["dataloader"]))
        stateful = [optimizer for optimizer in group.optimizers if optimizer.state and group.models]
        carried = {optimizer: carry(unit, optimizer) for optimizer in stateful}
        for number, names in before.items():
            model = _transform(unit, unit.given[number])
            if plan.placed.get(id(unit.given[number]), True):
                model = hooks.place_model(unit, model, unit.run.device)
            unit.wrapped.append(hooks.wrap_model(unit, model))
            _finish_model(unit, number, names)
        # Not before: torch cannot move a parameter in place that others refer to weakly.
        parameters.add(unit, original.items())
        for optimizer in group.optimizers:
            _rebind(unit, optimizer, carried.get(optimizer))
            made = hooks.transform_optimizer(unit, hooks.wrap_optimizer(unit, optimizer))
            unit.optimizers[unit.optimizers.index(optimizer)] = made
    if group.models:
        parameters.add(unit, unit.all_names())
        unit.record_ties()
        if unit.scaler is None:  # a model that comes later shares the unit's scale
            unit.use_scaler(hooks.grad_scaler(unit))


def _build_whole(
    unit: Unit, group: UnitGroup, plan: PreparePlan, before: Mapping[int, list[PartName]]
) -> None:
    """Build by a strategy that makes models, optimizers and schedulers one thing."""
    hooks, loaders = unit.hooks, plan.of_kind["dataloader"]
    unit.schedulers.extend(
        scheduler
        for scheduler in plan.of_kind["scheduler"]
        if any(scheduler.optimizer is optimizer for optimizer in unit.optimizers)
    )
    unit.configure(hooks.complete(unit.run.configs[unit.strategy], unit, loaders))
    for number, names in before.items():
        unit.replace_model(number, _transform(unit, unit.given[number]), names)
    for optimizer in group.optimizers:
        _rebind(unit, optimizer)
    hooks.prepare_unit(unit, loaders)
    _check_transformed(unit, unit.optimizers[len(unit.optimizers) - len(group.optimizers) :])
    for number, names in before.items():
        _finish_model(unit, number, names)


def _check_transformed(unit: Unit, optimizers: Sequence[Optimizer]) -> None:
    """Raise AccelError if a plugin replaces an optimizer that an engine steps."""
    for optimizer in optimizers:
        if unit.hooks.transform_optimizer(unit, optimizer) is not optimizer:
            plugins = " and ".join(one.plugin for one in unit.hooks.implementations("transform_optimizer"))
            raise AccelError(
                f"prepare: {plugins} would wrap the {type(optimizer).__name__}, which strategy"
                f" {unit.strategy!r} steps itself\nleave {plugins} out, or choose another strategy"
            )


def _transform(unit: Unit, model: nn.Module) -> nn.Module:
    for phase in PHASES[:-1]:
        model = unit.hooks.transform_model(unit, model, phase)
    return model


def _finish_model(unit: Unit, number: int, before: list[PartName]) -> None:
    """Run what follows the wrapping: the last phase, names, gradients, autocast."""
    hooks, run = unit.hooks, unit.run
    unit.wrapped[number] = wrapped = hooks.transform_model(unit, unit.wrapped[number], PHASES[-1])
    unit.replace_model(number, hooks.unwrap_model(unit, wrapped, True), before)
    attach_gradient_transforms(unit, number)
    unit.use_stream(unit.stream or fork(unit))
    context = forward_context(unit, hooks.autocast(unit))
    detach = attach(
        unit.models[number], context, run.device.type, outputs_to_fp32=run.config.autocast.outputs_to_fp32
    )
    if detach is not None:
        unit.detach.append(detach)


def _rebind(unit: Unit, optimizer: Optimizer, put_back: Callable[[], None] | None = None) -> None:
    """Give the optimizer the parameters that took the place of its original ones.

    put_back: restores the optimizer's state for the new parameters.
    """
    now = dict(unit.all_names())
    for group in optimizer.param_groups:
        names = [unit.run.parameters.name_of(parameter) for parameter in group["params"]]
        if lost := [name for name in names if name not in now]:
            raise AccelError(
                f"prepare: the {type(optimizer).__name__} holds {lost[0]}, which a transform of its model has"
                " taken away\nmake the optimizer from the prepared model's parameters"
            )
        if any(now[name] is not old for name, old in zip(names, group["params"], strict=True)):
            if optimizer.state and put_back is None:
                raise AccelError(
                    f"prepare: the {type(optimizer).__name__} already has state, and preparing its model"
                    " replaced the parameters\nprepare both in one call"
                )
            group["params"] = [now[name] for name in names]
    if put_back is not None:
        put_back()
