"""Models and optimizers that join a unit, which stays as it was if they cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

from accel_core.contract.unit import inside, parts_of

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.unit import PartName, Unit
    from accel_core.training.plan import UnitGroup


@contextmanager
def joining(group: UnitGroup, stream: Any) -> Iterator[dict[int, list[PartName]]]:
    """Have the group's models, optimizers, and other units without optimizers join its unit.

    stream: for the random numbers of forwards; None for the process's own.
    Gives the number and names of each new model. The block inside transforms and wraps them. If it raises,
    the unit is as before; what plugins have changed in the objects themselves stays.
    """
    unit, *others = group.units
    before = {name: getattr(unit, name) for name in unit.__slots__ if name != "__weakref__"}
    before = {name: copy(each) if isinstance(each, (list, dict)) else each for name, each in before.items()}
    attached = {id(detach) for each in group.units for detach in each.detach}
    unit.use_stream(stream)
    try:
        for other in others:
            _merge(unit, other)
        names = unit.add_models(group.models)
        unit.optimizers.extend(group.optimizers)
        yield names
        if group.models:
            unit.record_ties()
            if unit.scaler is None:  # a model that comes later shares the unit's scale
                unit.use_scaler(unit.hooks.grad_scaler(unit))
    except BaseException:  # a plugin may raise anything
        for detach in unit.detach:  # units that were to join keep their own
            if id(detach) not in attached:
                detach()
        for name, value in before.items():
            setattr(unit, name, value)
        raise


def _merge(unit: Unit, other: Unit) -> None:
    """Take over the models of a unit without optimizers."""
    unit.given.extend(other.given)
    unit.models.extend(other.models)
    unit.wrapped.extend(other.wrapped)
    unit.renamed.update(other.renamed)
    unit.detach.extend(other.detach)
    other.use_stream(unit.stream)
    unit.record_aliases()


def replace_model(unit: Unit, number: int, model: nn.Module, names: Sequence[PartName]) -> None:
    """Put a transformed or wrapped model in the place of the one with these names.

    Its parameters keep those names.
    """
    unit.models[number] = model = inside(model)
    users: dict[int, list[str]] = {}
    for _, name, part in names:
        users.setdefault(id(part), []).append(name)
    old = {name for name, _, _ in names}
    new = [(name, part) for name, part in parts_of(model) if name not in old]
    renamed = {name: users[id(part)].pop(0) for name, part in new if users.get(id(part))}
    unit.renamed[model] = {**renamed, **unit.renamed.get(model, {})}
