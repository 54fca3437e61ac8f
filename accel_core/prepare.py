"""How objects become units: classify, pair by identity, place, wrap, rebind, bind.

Everything that can be wrong with what was given is found before anything is changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_core.autocasting import attach
from accel_core.binding import LAYERS
from accel_core.data.loader import PreparedLoader, prepare_loader
from accel_core.errors import AccelError, ConfigError
from accel_core.hookspecs import PHASES
from accel_core.native.compiling import inside
from accel_core.proxies import PreparedOptimizer, PreparedScheduler

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.run import Run
    from accel_core.unit import Unit

__all__ = ["Homes", "prepare"]


class Homes:
    """Which unit a parameter belongs to, and under which name; by identity, old and new ones."""

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}
        self._names: dict[int, str] = {}
        self._alive: dict[int, weakref.ref[nn.Parameter]] = {}

    def add(self, parameter: nn.Parameter, unit: Unit, name: str) -> None:
        """Remember that `parameter` is, or was, `name` of `unit`."""
        key = id(parameter)
        self._units[key], self._names[key] = unit, name
        self._alive[key] = weakref.ref(parameter, lambda _: self._drop(key))

    def units_of(self, parameters: Iterable[object]) -> set[Unit | None]:
        """Their units; None among them for what no prepared model has."""
        return set(map(self._units.get, map(id, parameters)))

    def name_of(self, parameter: nn.Parameter) -> str:
        """The canonical name of a parameter that has a unit."""
        return self._names[id(parameter)]

    def forget(self) -> None:
        """Drop everything."""
        for key in list(self._alive):
            self._drop(key)

    def _drop(self, key: int) -> None:
        # Another object may get the number of one that is gone.
        for table in (self._units, self._names, self._alive):
            table.pop(key, None)


def prepare(
    run: Run,
    objects: Sequence[Any],
    *,
    strategy: str | None = None,
    name: str | None = None,
    placement: Sequence[bool] | None = None,
) -> list[Any]:
    """The prepared form of each object, in the order given. Collective.

    Raises:
        AccelError: an object of no known kind, an optimizer of unknown parameters, a scheduler of
            an unknown optimizer.
    """
    run.require_alive()
    places = list(placement) if placement is not None else [run.config.device_placement] * len(objects)
    if len(places) != len(objects):
        raise ConfigError(
            f"device_placement has {len(places)} entries for {len(objects)} objects; give one each"
        )
    kinds = [_kind(run, thing, number) for number, thing in enumerate(objects)]
    of_kind: dict[str, list[Any]] = {kind: [] for kind in ("model", "optimizer", "scheduler", "dataloader")}
    for kind, thing in zip(kinds, objects, strict=True):
        if kind is not None:
            of_kind[kind].append(thing)
    groups = _groups(run, of_kind["model"], of_kind["optimizer"])
    _check_schedulers(run, of_kind["scheduler"], of_kind["optimizer"])
    if name is not None and len(groups) != 1:
        raise ConfigError(
            f"name={name!r} needs objects of exactly one unit, got {len(groups)}; prepare them one by one"
        )
    placed = {id(thing): place for thing, place in zip(objects, places, strict=True)}
    units: list[Unit] = []
    for group in groups:
        units.append(group.check(run, strategy, name, units))
    for group, unit in zip(groups, units, strict=True):
        group.build(run, unit, placed, of_kind["scheduler"], of_kind["dataloader"])
    run.trained = [unit for unit in run.units if unit.optimizers]
    return [
        None if kind is None else _prepared(run, kind, thing, placed[id(thing)])
        for kind, thing in zip(kinds, objects, strict=True)
    ]


def _kind(run: Run, thing: Any, number: int) -> str | None:
    if thing is None:
        return None
    kind: str | None = run.hooks.kind_of(thing)
    if kind is None:
        raise AccelError(
            f"prepare: argument {number + 1} is a {type(thing).__module__}.{type(thing).__qualname__},"
            " which no plugin of this run knows how to prepare\n"
            "leave it out and use it as it is; models, optimizers, schedulers and dataloaders go in"
        )
    return kind


class _Group:
    """New models and optimizers that belong together, and the units they complete and so join."""

    def __init__(self, units: Sequence[Unit] = (), models: Sequence[nn.Module] = ()) -> None:
        self.units = list(units)
        self.models = list(models)
        self.optimizers: list[Optimizer] = []

    def join(self, other: _Group) -> None:
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

    def build(
        self,
        run: Run,
        unit: Unit,
        placed: Mapping[int, bool],
        schedulers: Sequence[Any],
        loaders: Sequence[Any],
    ) -> None:
        for other in self.units[1:]:
            run.absorb(unit, other)
        hooks, first = unit.hooks, len(unit.models)
        unit.models += map(inside, self.models)
        unit.given += self.models
        owner = hooks.owner("prepare_unit")
        if owner is not None and not owner.idle:
            mine = [*unit.optimizers, *self.optimizers]
            unit.schedulers += [each for each in schedulers if any(each.optimizer is one for one in mine)]
            _build_whole(run, unit, first, self.optimizers, loaders)
        else:
            unit.config = hooks.complete(run.configs[unit.strategy], unit, loaders)
            if self.models:
                _add_models(run, unit, first, placed)
            for optimizer in self.optimizers:
                _follow(run, unit, optimizer)
                unit.optimizers.append(hooks.wrap_optimizer(unit, optimizer))
        made = unit.optimizers[len(unit.optimizers) - len(self.optimizers) :]
        for optimizer, inner in zip(self.optimizers, made, strict=True):
            run.optimizers.append((optimizer, PreparedOptimizer(inner, unit)))
        if unit not in run.units:
            run.units.append(unit)


def _groups(run: Run, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[_Group]:
    """Pair optimizers with models by the identity of parameters."""
    groups = [_Group(models=[m]) for m in dict.fromkeys(models) if run.unit_of_model(m) is None]
    home: dict[object, _Group] = {p: group for group in groups for p in group.models[0].parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, PreparedOptimizer) or run.proxy_of(optimizer) is not None:
            continue
        mine: list[_Group] = []
        for parameter in _parameters(optimizer):
            group = home.get(parameter) or _group_of_unit(run, optimizer, parameter, home, groups)
            if group not in mine:
                mine.append(group)
        if not mine:
            raise AccelError(f"prepare: the {type(optimizer).__name__} holds no parameter")
        first, *others = mine
        first.optimizers.append(optimizer)
        for other in others:  # one optimizer over several models makes them one unit
            first.join(other)
            groups.remove(other)
            home.update({key: first for key, group in home.items() if group is other})
    return groups


def _group_of_unit(
    run: Run, optimizer: Optimizer, parameter: nn.Parameter, home: dict[object, _Group], groups: list[_Group]
) -> _Group:
    """The group that completes the unit of a parameter prepared before."""
    (unit,) = run.homes.units_of([parameter])
    if unit is None:
        raise _homeless(optimizer, parameter)
    if unit not in home:
        home[unit] = _Group(units=[unit])
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


def _check_schedulers(run: Run, schedulers: Iterable[Any], optimizers: Iterable[Optimizer]) -> None:
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


def _add_models(run: Run, unit: Unit, first: int, placed: Mapping[int, bool]) -> None:
    given = dict(unit.all_names())
    unit.record_aliases()
    hooks = unit.hooks
    for number, model in enumerate(unit.given[first:], first):
        before = list(_tensors(unit.models[number]))
        made = _transformed(unit, model)
        if placed.get(id(model), True):
            made = hooks.place_model(unit, made, run.device)
        unit.wrapped.append(hooks.wrap_model(unit, made))
        _settle(run, unit, number, before)
    _name(run, unit, given)


def _build_whole(
    run: Run, unit: Unit, first: int, optimizers: Sequence[Optimizer], loaders: Sequence[Any]
) -> None:
    """By a strategy that makes models, optimizers and schedulers one thing."""
    given = dict(unit.all_names())
    unit.record_aliases()
    before = [list(_tensors(model)) for model in unit.models[first:]]
    for name, parameter in given.items():
        run.homes.add(parameter, unit, name)
    unit.optimizers += optimizers
    unit.config = unit.hooks.complete(run.configs[unit.strategy], unit, loaders)
    for number, model in enumerate(unit.given[first:], first):
        unit.models[number] = inner = inside(_transformed(unit, model))
        unit.renamed[inner] = _renamed(before[number - first], inner)
    for optimizer in optimizers:
        _follow(run, unit, optimizer)
    unit.hooks.prepare_unit(unit, loaders)
    for number, tensors in enumerate(before, first):
        _settle(run, unit, number, tensors)
    _name(run, unit, given)


def _transformed(unit: Unit, model: nn.Module) -> nn.Module:
    for phase in PHASES[:-1]:
        model = unit.hooks.transform_model(unit, model, phase)
    return model


def _settle(run: Run, unit: Unit, number: int, before: Sequence[tuple[str, Tensor]]) -> None:
    """What a model has become: its last phase, the module inside, its names, its autocast."""
    hooks = unit.hooks
    unit.wrapped[number] = wrapped = hooks.transform_model(unit, unit.wrapped[number], PHASES[-1])
    unit.models[number] = inner = inside(hooks.unwrap_model(unit, wrapped, True))
    unit.renamed[inner] = _renamed(before, inner)
    detach = attach(inner, hooks.autocast(unit), run.config.autocast.outputs_to_fp32)
    if detach is not None:
        unit.detach.append(detach)


def _name(run: Run, unit: Unit, given: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in (*given.items(), *unit.all_names()):
        run.homes.add(parameter, unit, name)
    owner = unit.hooks.owner("backward")
    unit.backward_is_strategys = owner is not None and owner.layer == LAYERS["strategy"]
    if unit.scaler is None:  # a model that comes later shares the unit's scale
        unit.scaler = unit.hooks.grad_scaler(unit)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _renamed(before: Sequence[tuple[str, Tensor]], model: nn.Module) -> dict[str, str]:
    """Names that a transform or wrapper gave to tensors -> those they had in the user's model."""
    names: dict[int, list[str]] = {}
    for name, tensor in before:
        names.setdefault(id(tensor), []).append(name)
    known = {name for name, _ in before}
    new = [(name, tensor) for name, tensor in _tensors(model) if name not in known]
    return {name: names[id(tensor)].pop(0) for name, tensor in new if names.get(id(tensor))}


def _follow(run: Run, unit: Unit, optimizer: Optimizer) -> None:
    """Have the optimizer hold the parameters that took the place of those it was made with."""
    now = dict(unit.all_names())
    for group in optimizer.param_groups:
        names = [run.homes.name_of(parameter) for parameter in group["params"]]
        if lost := [name for name in names if name not in now]:
            raise AccelError(
                f"prepare: the {type(optimizer).__name__} holds {lost[0]}, which a transform of its model has"
                " taken away\nmake the optimizer from the prepared model's parameters"
            )
        if any(now[name] is not old for name, old in zip(names, group["params"], strict=True)):
            if optimizer.state:
                raise AccelError(
                    f"prepare: the {type(optimizer).__name__} already has state, and preparing its model"
                    " replaced the parameters\nprepare the optimizer before its first step, then load_state"
                )
            group["params"] = [now[name] for name in names]


def _prepared(run: Run, kind: str, thing: Any, place: bool) -> Any:
    if kind == "model":
        unit = run.unit_of_model(thing)
        assert unit is not None
        return thing if thing in unit.wrapped else unit.wrapped[unit.given.index(thing)]
    if kind == "optimizer":
        return thing if isinstance(thing, PreparedOptimizer) else run.proxy_of(thing)
    if kind == "scheduler":
        return thing if isinstance(thing, PreparedScheduler) else _scheduler(run, thing)
    if isinstance(thing, PreparedLoader):
        return thing
    loader = prepare_loader(thing, run, device_placement=place)
    run.loaders.append(loader)
    return loader


def _scheduler(run: Run, scheduler: Any) -> PreparedScheduler:
    optimizer = run.proxy_of(scheduler.optimizer)
    assert optimizer is not None
    unit = optimizer.unit
    unit.schedulers = [each for each in unit.schedulers if each is not scheduler]
    inner = unit.hooks.wrap_scheduler(unit, scheduler)
    unit.schedulers.append(inner)
    return PreparedScheduler(
        inner,
        [optimizer],
        follows=run.config.step_scheduler_with_optimizer,
        each_micro_batch=not run.config.accumulation.adjust_scheduler,
    )
