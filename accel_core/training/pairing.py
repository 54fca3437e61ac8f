"""Which objects belong together: paired by the identity of parameters, before anything is changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from accel_core.errors import AccelError, ConfigError
from accel_core.training.proxies import PreparedOptimizer, PreparedScheduler

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit

    _Known = tuple[weakref.ref[nn.Parameter], Unit, str]

__all__ = ["Group", "check_schedulers", "paired"]


class Group:
    """New models and optimizers that belong together, and the units they complete and so join."""

    def __init__(self, units: Sequence[Unit] = (), models: Sequence[nn.Module] = ()) -> None:
        self.units = list(units)
        self.models = list(models)
        self.optimizers: list[Optimizer] = []

    def join(self, other: Group) -> None:
        """Take over what the other has."""
        self.units += other.units
        self.models += other.models
        self.optimizers += other.optimizers

    def check(self, run: Run, strategy: str | None, name: str | None, made: Sequence[Unit]) -> Unit:
        """The unit to build in. Raises what speaks against it; nothing is changed until all are checked."""
        self.units.sort(key=lambda unit: not unit.optimizers)
        for other in self.units[1:]:
            if self.units[0].strategy != other.strategy or other.optimizers:
                raise ConfigError(
                    f"an optimizer spans the units {self.units[0].name!r} and {other.name!r}, which cannot be"
                    " joined now\nprepare both models and all their optimizers in one call, with one strategy"
                )
        unit = self.units[0] if self.units else run.make_unit(name, strategy, made)
        if strategy is not None and unit.strategy != strategy:
            raise ConfigError(
                f"prepare(strategy={strategy!r}): these objects belong to unit {unit.name!r}, prepared with"
                f" {unit.strategy!r}\nprepare all objects of a unit with the same strategy"
            )
        reasons = unit.hooks.refuse_unit(unit, self.models, self.optimizers)
        if reasons:
            raise ConfigError("\n".join(reasons), problems=reasons)
        return unit


def paired(run: Run, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[Group]:
    """Pair optimizers with models by the identity of parameters."""
    groups = [Group(models=[m]) for m in dict.fromkeys(models) if run.unit_of_model(m) is None]
    home: dict[object, Group] = {p: group for group in groups for p in group.models[0].parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, PreparedOptimizer) or run.proxy_of(optimizer) is not None:
            continue
        mine: list[Group] = []
        for parameter in _parameters(optimizer):
            group = home.get(parameter) or _group_of_unit(run, optimizer, parameter, home, groups)
            if group not in mine:
                mine.append(group)
        if not mine:
            about = f"prepare: the {type(optimizer).__name__} holds no parameter"
            raise AccelError(f"{about}\ngive it the parameters of a model")
        first, *others = mine
        first.optimizers.append(optimizer)
        for other in others:  # one optimizer over several models makes them one unit
            first.join(other)
            groups.remove(other)
            home.update({key: first for key, group in home.items() if group is other})
    return groups


def _group_of_unit(
    run: Run, optimizer: Optimizer, parameter: nn.Parameter, home: dict[object, Group], groups: list[Group]
) -> Group:
    """The group that completes the unit of a parameter prepared before."""
    (unit,) = run.homes.units_of([parameter])
    if unit is None:
        raise _homeless(optimizer, parameter)
    if unit not in home:
        home[unit] = Group(units=[unit])
        groups.append(home[unit])
    return home[unit]


def _homeless(optimizer: Optimizer, parameter: nn.Parameter) -> AccelError:
    return AccelError(
        f"prepare: the {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that no"
        " prepared model has; its gradient would not be reduced and its state could not be saved by name\n"
        "prepare the model it belongs to in the same call or before, or register it in a module"
    )


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_schedulers(run: Run, schedulers: Iterable[Any], optimizers: Iterable[Optimizer]) -> None:
    """Raises AccelError: one schedules an optimizer that is not prepared."""
    coming = list(optimizers)
    for scheduler in schedulers:
        if isinstance(scheduler, PreparedScheduler):
            continue
        optimizer = getattr(scheduler, "optimizer", None)
        if not any(optimizer is known for known in coming) and run.proxy_of(optimizer) is None:
            raise AccelError(
                f"prepare: the {type(scheduler).__name__} schedules an optimizer that was not prepared\n"
                "prepare its optimizer in the same call or before"
            )
