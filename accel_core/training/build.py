"""The build of a unit: its objects are transformed, placed, wrapped and rebound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_not
from typing import TYPE_CHECKING, Any

from accel_core.contract.hooks import PHASES
from accel_core.distributed.progress import show_progress
from accel_core.distributed.streams import fork
from accel_core.errors import AccelError
from accel_core.training.autocast import attach_contexts
from accel_core.training.changes import Changes
from accel_core.training.joining import joining, replace_model
from accel_core.training.prior_state import carry
from accel_core.training.proxies import PreparedOptimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.prepared import PreparedObjects
    from accel_core.contract.unit import PartName, Unit
    from accel_core.training.plan import PreparePlan, UnitGroup

    NameOf = Callable[[nn.Parameter], str]


def build_unit(group: UnitGroup, plan: PreparePlan, prepared: PreparedObjects) -> None:
    """Take the group's objects into its unit, and the unit into what is prepared.

    Collective. A unit that cannot be built is left as it was before.
    """
    unit = group.unit
    stream = unit.stream or fork(unit)
    models = " and ".join(type(model).__name__ for model in group.models)
    earlier = [(each, name, p) for each in group.units for name, p in each.all_names()]
    with (
        show_progress(f"preparing {models} for {unit.strategy}"),
        joining(group, stream) as names,
    ):
        before = {parameter: name for name, parameter in unit.all_names()}
        moved = {
            (each, name): before[p] for each, name, p in earlier if name != before[p] or each is not unit
        }

        def name_of(parameter: nn.Parameter) -> str:
            try:
                return before.get(parameter) or prepared.parameters.name_of(parameter, moved)
            except KeyError:  # one that a transform of its model has given to the optimizer too
                names_now = (name for name, each in unit.all_names() if each is parameter)
                return next(names_now, "a parameter of no model")

        held = {
            before.get(p) or name_of(p)
            for each in group.optimizers
            for g in each.param_groups
            for p in g["params"]
        }
        if unit.hooks.step("prepare_unit") is None:
            _build(group, plan, names, name_of)
        else:
            _build_whole(group, plan, names, name_of)
    inner = _last(unit.optimizers, len(group.optimizers))
    proxies = [PreparedOptimizer(optimizer, unit) for optimizer in inner]
    added = zip(group.optimizers, proxies, strict=True)
    prepared.add_unit(unit, group.units[1:], added, before, moved)
    prepared.parameters.note_held(unit, held)
    unit.use_changes(Changes(unit))
    _warn_of_left_out(unit, prepared)


def _warn_of_left_out(unit: Unit, prepared: PreparedObjects) -> None:
    """Warn of parameters that train and are in no optimizer."""
    if not unit.optimizers or not prepared.parameters.leave_out(unit, unit.named_parameters().values()):
        return
    from accel_core.distributed.logging import get_logger  # late: few runs need it

    named = unit.named_parameters().items()
    left = [name for name, each in named if prepared.parameters.leave_out(unit, [each])]
    get_logger(__name__).warning(
        "prepare: %d parameter(s) of unit %s train and are in no optimizer (%s): their gradients are"
        " computed, count when gradients are clipped, and are applied by nobody; freeze them by"
        " requires_grad_(False), or give them to an optimizer before prepare",
        *(len(left), unit.name, ", ".join(left[:3]) + (" and more" if len(left) > 3 else "")),
    )


def _build(group: UnitGroup, plan: PreparePlan, names: Mapping[int, list[PartName]], name_of: NameOf) -> None:
    """Wrap each model and each optimizer by itself."""
    unit, carried = group.unit, _carry(group)
    for number, parts in names.items():
        _wrap(unit, plan, number, _transform(unit, unit.given[number]), parts)
    for optimizer in group.optimizers:
        _take_in(unit, optimizer, name_of, carried.get(optimizer))


def _build_whole(
    group: UnitGroup, plan: PreparePlan, names: Mapping[int, list[PartName]], name_of: NameOf
) -> None:
    """Build by a plugin that makes models, optimizers and schedulers one, or has the base wrap each."""
    unit, models = group.unit, dict[int, Any]()
    first, added = len(unit.schedulers), plan.schedulers_of(unit.optimizers)
    unit.schedulers.extend(added)
    for number, parts in names.items():
        models[number] = _transform(unit, unit.given[number])
        replace_model(unit, number, models[number], parts)
    for optimizer in group.optimizers:
        _rebind(unit, optimizer, name_of)

    def build_each() -> None:
        before, carried = {parameter: name for name, parameter in unit.all_names()}, _carry(group)
        unit.use_build(None)
        for number, parts in names.items():
            _wrap(unit, plan, number, models[number], parts)
        for optimizer in group.optimizers:
            _take_in(unit, optimizer, lambda p: before.get(p) or name_of(p), carried.get(optimizer))

    unit.use_build(build_each)
    unit.hooks.prepare_unit(unit, plan.of_kind["dataloader"])
    plan.stepped.update(zip(map(id, added), unit.schedulers[first:], strict=False))
    if unit.build_each is None:  # the base was asked
        return
    unit.use_build(None)
    _check_transformed(unit, _last(unit.optimizers, len(group.optimizers)))
    for number, parts in names.items():
        _finish_model(unit, number, parts)


def _carry(group: UnitGroup) -> dict[Optimizer, Callable[[], None]]:
    """Return functions that put the state of new optimizers back once the models are wrapped."""
    stateful = [optimizer for optimizer in group.optimizers if optimizer.state and group.models]
    return {optimizer: carry(group.unit, optimizer) for optimizer in stateful}


def _wrap(unit: Unit, plan: PreparePlan, number: int, model: nn.Module, parts: list[PartName]) -> None:
    if plan.placed.get(id(unit.given[number]), True):
        model = unit.hooks.place_model(unit, model, unit.run.device)
    unit.wrapped.append(unit.hooks.wrap_model(unit, model))
    _finish_model(unit, number, parts)


def _take_in(unit: Unit, optimizer: Optimizer, name_of: NameOf, put_back: Callable[[], None] | None) -> None:
    _rebind(unit, optimizer, name_of, put_back)
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


def _finish_model(unit: Unit, number: int, before: list[PartName]) -> None:
    """Run what follows the wrapping: the last phase, names, gradients, autocast."""
    hooks = unit.hooks
    unit.wrapped[number] = wrapped = hooks.transform_model(unit, unit.wrapped[number], PHASES[-1])
    replace_model(unit, number, hooks.unwrap_model(unit, wrapped, True), before)
    attach_contexts(unit, unit.models[number])


def _rebind(
    unit: Unit, optimizer: Optimizer, name_of: NameOf, put_back: Callable[[], None] | None = None
) -> None:
    """Give the optimizer the parameters that took the place of its original ones.

    name_of: of a parameter that may be an original one. put_back: restores the optimizer's state for the
    new parameters (see `carry`).
    """
    now = dict(unit.all_names())
    for group in optimizer.param_groups:
        names = [name_of(parameter) for parameter in group["params"]]
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
