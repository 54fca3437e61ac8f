"""The plan of a `prepare` call: the kinds of objects, the groups that form units, and checks.

Planning changes nothing. The build notes in the plan which schedulers an engine has replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from attrs import Factory, define, frozen
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_core.errors import AccelError, ConfigError
from accel_core.training.prepared import given_of
from accel_core.training.proxies import PreparedOptimizer, PreparedScheduler

if TYPE_CHECKING:
    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit
    from accel_core.training.prepared import PreparedObjects

KINDS: Final[Mapping[str, type]] = {
    "model": nn.Module,
    "optimizer": Optimizer,
    "scheduler": LRScheduler,
    "dataloader": DataLoader,
}
"""Kind of an object that `prepare` takes -> torch's class."""


def kind_of(run: Run, thing: object) -> str | None:
    """Return the kind of an object, a key of `KINDS`; None if `prepare` does not know its class."""
    for kind, cls in KINDS.items():
        if isinstance(thing, cls):
            return kind
    paths = {f"{cls.__module__}:{cls.__qualname__}" for cls in type(thing).__mro__}
    declared = (item for card in run.cards.values() for item in card.prepares.items())
    return next((kind for path, kind in declared if path in paths), None)


@define(eq=False)
class UnitGroup:
    """New models and optimizers that form one unit, or new optimizers of a prepared unit.

    Attributes:
        models: new models.
        optimizers: new optimizers.
        units: the prepared units whose parameters the optimizers hold. If empty, `prepare` adds a new unit.
    """

    models: list[nn.Module] = Factory(list)
    optimizers: list[Optimizer] = Factory(list)
    units: list[Unit] = Factory(list)

    @property
    def unit(self) -> Unit:
        """The unit that the objects are added to."""
        return self.units[0]

    def take_over(self, other: UnitGroup) -> None:
        """Add the objects and units of the other group to this one."""
        self.models += other.models
        self.optimizers += other.optimizers
        self.units += other.units

    def check(self, strategy: str | None) -> None:
        """Raise ConfigError for models of several `prepare` calls, or if the unit has another strategy."""
        names = [f"unit {unit.name!r}" for unit in self.units]
        if self.units and self.models:
            names.append(f"the new {type(self.models[0]).__name__}")
        if len(names) > 1:
            raise ConfigError(
                f"prepare: the {type(self.optimizers[0]).__name__} holds parameters of {' and '.join(names)};"
                " models that share an optimizer must be prepared together\n"
                "prepare them and all their optimizers in one call: accelerator.prepare(first, second,"
                " optimizer)"
            )
        if strategy is not None and self.units and self.units[0].strategy != strategy:
            raise ConfigError(
                f"prepare(strategy={strategy!r}): these objects belong to unit {self.units[0].name!r},"
                f" prepared with {self.units[0].strategy!r}\n"
                "prepare all objects of a unit with the same strategy"
            )

    def check_unit(self, placed: Mapping[int, bool]) -> None:
        """Raise ConfigError if the unit's device, strategy or a plugin cannot take the objects."""
        unit = self.unit
        reasons = _refuse_float64(unit, [model for model in self.models if placed.get(id(model), True)])
        count = len(unit.optimizers) + len(self.optimizers)
        if count > 1 and "several_optimizers" not in unit.offers:
            reasons.append(
                f"strategy {unit.strategy!r} takes one optimizer per unit, and {unit.name!r} has"
                f" {count}\ngive one optimizer several parameter groups"
            )
        reasons += _refuse_sharded(unit, self.models)
        reasons += unit.hooks.refuse_unit(unit, self.models, self.optimizers)
        if reasons:
            raise ConfigError("\n".join(reasons), problems=reasons)


@frozen
class PreparePlan:
    """The objects of one `prepare` call.

    Attributes:
        objects: the arguments; for objects that another run has prepared, the user's object inside.
        of_kind: kind -> its objects.
        placed: id of an object -> whether it is moved to the device.
        groups: one group per unit that gets new objects.
        schedules: (scheduler, its optimizer) of the new schedulers.
        engine_schedulers: id of a scheduler -> the scheduler by which an engine replaced it.
    """

    objects: Sequence[Any]
    of_kind: Mapping[str, Sequence[Any]]
    placed: Mapping[int, bool]
    groups: Sequence[UnitGroup]
    schedules: Sequence[tuple[Any, Any]]
    engine_schedulers: dict[int, Any] = Factory(dict)

    def schedulers_of(self, optimizers: Sequence[Optimizer]) -> list[Any]:
        """Return the new schedulers of these optimizers."""
        return [scheduler for scheduler, own in self.schedules if any(own is each for each in optimizers)]

    def in_words(self) -> str:
        """Describe the objects, which all ranks must pass alike; under model parallelism, count them."""
        models, optimizers, schedulers, loaders = (self.of_kind[kind] for kind in KINDS)
        meshes = [group.unit.mesh for group in self.groups]
        if any(mesh is not None and mesh.size(*mesh.names("model")) > 1 for mesh in meshes):
            words = [f"{len(models)} model(s)", f"{len(optimizers)} optimizer(s)"]
        else:
            words = [*map(_model_in_words, models), *map(_optimizer_in_words, optimizers)]
        words += [type(scheduler).__name__ for scheduler in schedulers]
        words += [f"{len(loaders)} dataloader(s)"] if loaders else []
        return ", ".join(words)


def _model_in_words(model: nn.Module) -> str:
    parameters = list(model.parameters())
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
    size = f"{sum(parameter.numel() for parameter in parameters):,} parameters"
    return f"{type(model).__name__} ({', '.join([*dtypes, size])})"


def _optimizer_in_words(optimizer: Optimizer) -> str:
    """Describe the optimizer by its class and the plain values of its groups.

    Tensors are left out: reading them would wait for the device.
    """
    from accel_core.checkpoint.sections.optimizers import NEVER_RESTORED  # late: only several ranks need it

    groups = [
        {key: each for key, each in group.items() if key not in NEVER_RESTORED and _is_plain(each)}
        for group in optimizer.param_groups
    ]
    shown = {", ".join(sorted(f"{key}={each!r}" for key, each in group.items())): None for group in groups}
    return f"{type(optimizer).__name__} ({'; '.join(shown)})"


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) or (
        isinstance(value, tuple) and all(map(_is_plain, value))
    )


def plan_prepare(
    prepared: PreparedObjects,
    objects: Sequence[Any],
    kind_of: Callable[[Any], str | None],
    placement: Sequence[bool],
    *,
    strategy: str | None = None,
    name: str | None = None,
) -> PreparePlan:
    """Plan `prepare(*objects)`, with regard to objects prepared before. Not collective.

    Args:
        prepared: the objects that the run has prepared already.
        objects: the arguments of `prepare`; None is allowed.
        kind_of: returns the kind of an object, or None.
        placement: whether each object is moved to the device.
        strategy: alias of the strategy that the call names.
        name: name for the unit.

    Raises:
        AccelError: an object is of no known kind, an optimizer holds unknown parameters, or a scheduler
            belongs to an unknown optimizer.
        ConfigError: the objects do not form units of this strategy or name.
    """
    if len(placement) != len(objects):
        raise ConfigError(
            f"device_placement has {len(placement)} entries for {len(objects)} objects\ngive one per object"
        )
    kinds = [None if thing is None else kind_of(thing) for thing in objects]
    for number, (kind, thing) in enumerate(zip(kinds, objects, strict=True), start=1):
        if kind is None and thing is not None:
            _refuse_kind(thing, number)
    of_kind: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    new: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    objects = list(objects)
    for number, (kind, thing) in enumerate(zip(kinds, objects, strict=True)):
        if kind is not None:
            is_new = prepared.form_of(thing) is None
            inner = _inside(thing) if is_new else thing
            objects[number] = inner
            of_kind[kind].append(inner)
            if is_new and (inner is thing or prepared.form_of(inner) is None):
                new[kind].append(inner)
    groups = _group_objects(prepared, new["model"], new["optimizer"])
    schedules = _schedules(prepared, new["scheduler"], of_kind["optimizer"])
    if name is not None and len(groups) != 1:
        raise ConfigError(
            f"name={name!r} needs objects of exactly one unit, got {len(groups)}\nprepare them one by one"
        )
    for group in groups:
        group.check(strategy)
    placed = {id(thing): place for thing, place in zip(objects, placement, strict=True)}
    return PreparePlan(objects, of_kind, placed, groups, schedules)


def _inside(thing: Any) -> Any:
    """Return the object inside an object that another run has prepared, or this run before `free_memory`."""
    if isinstance(thing, PreparedOptimizer):
        return thing.optimizer
    if isinstance(thing, PreparedScheduler):
        return thing.scheduler
    return given_of(thing) if isinstance(thing, nn.Module) else thing


def _refuse_kind(thing: Any, number: int) -> NoReturn:
    raise AccelError(
        f"prepare: argument {number} is a {type(thing).__module__}.{type(thing).__qualname__},"
        " which no plugin of this run knows how to prepare\n"
        "leave it out and use it as it is; prepare takes models, optimizers, schedulers and dataloaders"
    )


def _group_objects(
    prepared: PreparedObjects, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]
) -> list[UnitGroup]:
    """Group new optimizers with the new models and prepared units whose parameters they hold."""
    groups = [UnitGroup(models=[model]) for model in dict.fromkeys(models)]
    group_of: dict[object, UnitGroup] = {p: group for group in groups for p in group.models[0].parameters()}
    for optimizer in dict.fromkeys(optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        joined: list[UnitGroup] = []
        for parameter in parameters:
            # Parameters that no new model has belong to a prepared unit, which is the key of their group.
            key = parameter if parameter in group_of else _unit_of(prepared, optimizer, parameter)
            if key not in group_of:
                group_of[key] = UnitGroup(units=[key])
                groups.append(group_of[key])
            if group_of[key] not in joined:
                joined.append(group_of[key])
        if not joined:
            about = f"prepare: the {type(optimizer).__name__} holds no parameter"
            raise AccelError(f"{about}\ngive it the parameters of a model")
        first, *others = joined
        first.optimizers.append(optimizer)
        for other in others:  # models that share an optimizer form one unit
            first.take_over(other)
            groups.remove(other)
            group_of.update({key: first for key, group in group_of.items() if group is other})
    return groups


def _unit_of(prepared: PreparedObjects, optimizer: Optimizer, parameter: nn.Parameter) -> Unit:
    """Return the prepared unit that a parameter of the optimizer belongs to."""
    (unit,) = prepared.units_of([parameter])
    if unit is None:
        raise AccelError(
            f"prepare: the {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)}"
            " that no prepared model has; its gradient would not be reduced and its state could not be saved"
            " by name\n"
            "prepare the model it belongs to in the same call or before, or register it in a module"
        )
    return unit


def _schedules(
    prepared: PreparedObjects, schedulers: Iterable[Any], optimizers: Iterable[Optimizer]
) -> list[tuple[Any, Any]]:
    """Return (scheduler, its optimizer) for each new scheduler.

    Raises:
        AccelError: an optimizer is not prepared, neither before nor in this call.
    """
    coming = list(optimizers)
    schedules = []
    for scheduler in {id(scheduler): scheduler for scheduler in schedulers}.values():
        optimizer = getattr(scheduler, "optimizer", None)
        if isinstance(optimizer, PreparedOptimizer):
            optimizer = optimizer.optimizer
        if not any(optimizer is other for other in coming) and prepared.form_of(optimizer) is None:
            raise AccelError(
                f"prepare: the {type(scheduler).__name__} schedules an optimizer that was not prepared\n"
                "prepare its optimizer in the same call or before"
            )
        schedules.append((scheduler, optimizer))
    return schedules


def _refuse_sharded(unit: Unit, models: Iterable[nn.Module]) -> list[str]:
    """Return a reason for each model with parameters in parts if the unit's strategy wraps whole ones."""
    is_wrapped = unit.hooks.step("wrap_model") or unit.hooks.step("prepare_unit")
    reasons = []
    for model in () if "dtensors" in unit.offers or not is_wrapped else models:
        name = next((name for name, each in model.named_parameters() if hasattr(each, "device_mesh")), None)
        if name is not None:
            from accel_core.plugins.discovery import suggest_strategy  # late: an error needs it

            reasons.append(
                f"prepare: {name} of the {type(model).__name__} is a DTensor, which the program has sharded"
                f" or split, and strategy {unit.strategy!r} trains whole parameters\n"
                f"{suggest_strategy('dtensors')}, or load the model whole"
            )
    return reasons


def _refuse_float64(unit: Unit, models: Iterable[nn.Module]) -> list[str]:
    """Return a reason for each model with float64 tensors if the unit's device has no float64."""
    device, reasons = unit.run.device, []
    for model in () if "float64" in unit.hooks.capabilities(device) else models:
        tensors = (*model.named_parameters(), *model.named_buffers())
        names = [name for name, each in tensors if each.dtype in (torch.float64, torch.complex128)]
        if names:
            reasons.append(
                f"prepare: {', '.join(names[:5])} of the {type(model).__name__} is float64, which {device}"
                " lacks\nconvert the model first: model.float(), or leave it where it is:"
                " device_placement=[False]"
            )
    return reasons
