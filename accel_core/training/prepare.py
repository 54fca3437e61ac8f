"""How objects become units: classified, paired (see `pairing`), placed, wrapped, rebound.

Everything that can be wrong with what was given is found before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from accel_core.contract.hooks import PHASES
from accel_core.contract.unit import own_name
from accel_core.data.loader import prepare_loader
from accel_core.distributed.streams import fork, forward_context
from accel_core.distributed.watch import assemble
from accel_core.errors import AccelError, ConfigError
from accel_core.plugins.binding import LAYERS
from accel_core.training.autocast import attach
from accel_core.training.compile import inside
from accel_core.training.gradients import attach_gradient_transforms
from accel_core.training.pairing import check_schedulers, paired
from accel_core.training.prior_state import carry
from accel_core.training.proxies import PreparedOptimizer, PreparedScheduler

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.run import Run
    from accel_core.training.pairing import Group
from accel_core.contract.unit import Unit

__all__ = ["prepare"]

_GROWING: Final = ("given", "models", "wrapped", "optimizers", "schedulers", "detach")
"""What a unit has one each of for the objects in it."""
_SINGLE: Final = ("config", "scaler", "backward_is_strategys")


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
            f"device_placement has {len(places)} entries for {len(objects)} objects\ngive one each"
        )
    kinds = [_kind(run, thing, number) for number, thing in enumerate(objects)]
    of_kind: dict[str, list[Any]] = {kind: [] for kind in ("model", "optimizer", "scheduler", "dataloader")}
    for kind, thing in zip(kinds, objects, strict=True):
        if kind is not None:
            of_kind[kind].append(thing)
    groups = paired(run, of_kind["model"], of_kind["optimizer"])
    check_schedulers(run, of_kind["scheduler"], of_kind["optimizer"])
    if name is not None and len(groups) != 1:
        raise ConfigError(
            f"name={name!r} needs objects of exactly one unit, got {len(groups)}\nprepare them one by one"
        )
    placed = {id(thing): place for thing, place in zip(objects, places, strict=True)}
    loaders = {id(each): prepare_loader(each, run, placed[id(each)]) for each in of_kind["dataloader"]}
    units: list[Unit] = []
    for group in groups:
        units.append(group.check(run, strategy, name, units))
    if of_kind["model"]:
        assemble(run, "prepare", _in_words(of_kind["model"], units))
    for group, unit in zip(groups, units, strict=True):
        with _all_or_nothing(run, unit):
            _build(run, unit, group, placed, of_kind["scheduler"], of_kind["dataloader"])
    run.loaders += [loader for loader in loaders.values() if loader not in run.loaders]
    made = [
        loaders[id(thing)] if kind == "dataloader" else _prepared(run, kind, thing)
        for kind, thing in zip(kinds, objects, strict=True)
    ]
    new = [each for each in made if not any(each is other for other in run.prepared)]
    run.prepared += [each for each in new if each is not None and each not in run.loaders]
    return made


def _in_words(models: Sequence[nn.Module], units: Sequence[Unit]) -> str:
    """What ranks must bring alike; ranks that have parts of a model may bring other ones."""
    if any(unit.mesh is not None and unit.mesh.size(*unit.mesh.names("model")) > 1 for unit in units):
        return f"{len(models)} model(s)"
    dtypes = [
        sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters()}) for model in models
    ]
    named = zip(models, dtypes, strict=True)
    return ", ".join(f"{type(model).__name__} ({', '.join(kinds)})" for model, kinds in named)


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


@contextmanager
def _all_or_nothing(run: Run, unit: Unit) -> Iterator[None]:
    """A unit that could not be built is what it was before; what plugins did to the objects stays done."""
    known, homes = list(run.units), run.homes.copy()
    before: dict[str, Any] = {name: list(getattr(unit, name)) for name in _GROWING}
    before |= {name: getattr(unit, name) for name in _SINGLE} | {"renamed": dict(unit.renamed)}
    attached = {id(detach) for each in (unit, *known) for detach in each.detach}
    try:
        yield
    except BaseException:  # a plugin's, of any kind: it goes on
        for detach in unit.detach:  # those of units that were to join stay
            if id(detach) not in attached:
                detach()
        for name, value in before.items():
            setattr(unit, name, value)
        unit.record_aliases()
        run.units[:] = known
        run.homes.restore(homes)
        raise
    run.trained = [unit for unit in run.units if unit.optimizers]


def _build(
    run: Run,
    unit: Unit,
    group: Group,
    placed: Mapping[int, bool],
    schedulers: Sequence[Any],
    loaders: Sequence[Any],
) -> None:
    for other in group.units[1:]:
        run.absorb(unit, other)
    hooks, first = unit.hooks, len(unit.models)
    unit.models += map(inside, group.models)
    unit.given += group.models
    if hooks.step("prepare_unit") is not None:
        mine = [*unit.optimizers, *group.optimizers]
        unit.schedulers += [each for each in schedulers if any(each.optimizer is one for one in mine)]
        _build_whole(run, unit, first, group.optimizers, loaders)
    else:
        unit.optimizers += group.optimizers
        unit.config = hooks.complete(run.configs[unit.strategy], unit, loaders)
        stateful = [each for each in group.optimizers if each.state] if group.models else []
        carried = {each: carry(unit, each) for each in stateful}
        if group.models:
            _add_models(run, unit, first, placed)
        for optimizer in group.optimizers:
            _follow(run, unit, optimizer, carried.get(optimizer))
            made = hooks.transform_optimizer(unit, hooks.wrap_optimizer(unit, optimizer))
            unit.optimizers[unit.optimizers.index(optimizer)] = made
    inners = unit.optimizers[len(unit.optimizers) - len(group.optimizers) :]
    for optimizer, inner in zip(group.optimizers, inners, strict=True):
        run.optimizers.append((optimizer, PreparedOptimizer(inner, unit)))
    if unit not in run.units:
        run.units.append(unit)


def _add_models(run: Run, unit: Unit, first: int, placed: Mapping[int, bool]) -> None:
    given = dict(unit.all_names())
    unit.record_aliases()
    hooks = unit.hooks
    for number, model in enumerate(unit.given[first:], first):
        before = _names(unit.models[number])
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
    before = [_names(model) for model in unit.models[first:]]
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
    _transform_engines(unit, unit.optimizers[len(unit.optimizers) - len(optimizers) :])
    for number, tensors in enumerate(before, first):
        _settle(run, unit, number, tensors)
    _name(run, unit, given)


def _transform_engines(unit: Unit, optimizers: Sequence[Optimizer]) -> None:
    """Raises AccelError: a plugin replaces an optimizer that the strategy's engine goes on stepping."""
    for optimizer in optimizers:
        if unit.hooks.transform_optimizer(unit, optimizer) is not optimizer:
            plugins = " and ".join(one.plugin for one in unit.hooks.implementations("transform_optimizer"))
            raise AccelError(
                f"prepare: {plugins} would wrap the {type(optimizer).__name__}, which strategy"
                f" {unit.strategy!r} steps itself\nleave {plugins} out, or choose another strategy"
            )


def _transformed(unit: Unit, model: nn.Module) -> nn.Module:
    for phase in PHASES[:-1]:
        model = unit.hooks.transform_model(unit, model, phase)
    return model


def _settle(run: Run, unit: Unit, number: int, before: Sequence[tuple[str, str, Any]]) -> None:
    """What a model has become: its last phase, the module inside, its names, its autocast."""
    hooks = unit.hooks
    unit.wrapped[number] = wrapped = hooks.transform_model(unit, unit.wrapped[number], PHASES[-1])
    unit.models[number] = inner = inside(hooks.unwrap_model(unit, wrapped, True))
    unit.renamed[inner] = {**_renamed(before, inner), **unit.renamed.get(inner, {})}
    attach_gradient_transforms(unit, number)
    unit.stream = unit.stream or fork(run, unit)
    converted = run.device.type if run.config.autocast.outputs_to_fp32 else None
    detach = attach(inner, forward_context(unit, hooks.autocast(unit)), converted)
    if detach is not None:
        unit.detach.append(detach)


def _name(run: Run, unit: Unit, given: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in given.items():
        run.homes.add(parameter, unit, name)
    run.homes.settle(unit)
    now = dict(unit.all_names())
    unit.tied = {each for each, owner in unit.aliases.items() if each in now and now[each] is now.get(owner)}
    topmost = unit.hooks.implementations("backward")[-1]
    unit.backward_is_strategys = topmost.layer == LAYERS["strategy"]
    if unit.scaler is None:  # a model that comes later shares the unit's scale
        unit.scaler = unit.hooks.grad_scaler(unit)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """What has a name in the model: tensors, and the modules that may hold more."""
    yield from model.named_modules(remove_duplicate=False)
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _names(model: nn.Module) -> list[tuple[str, str, Any]]:
    """(name in the model as it is, the user's name, tensor or module)."""
    return [(name, own_name(model, name), each) for name, each in _tensors(model)]


def _renamed(before: Sequence[tuple[str, str, Any]], model: nn.Module) -> dict[str, str]:
    """Names that a transform or wrapper gave to tensors and modules -> those they had in the user's model."""
    names: dict[int, list[str]] = {}
    for _, name, tensor in before:
        names.setdefault(id(tensor), []).append(name)
    known = {name for name, _, _ in before}
    new = [(name, tensor) for name, tensor in _tensors(model) if name not in known]
    return {name: names[id(tensor)].pop(0) for name, tensor in new if names.get(id(tensor))}


def _follow(run: Run, unit: Unit, optimizer: Optimizer, carried: Callable[[], None] | None = None) -> None:
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
            if optimizer.state and carried is None:
                raise AccelError(
                    f"prepare: the {type(optimizer).__name__} already has state, and preparing its model"
                    " replaced the parameters\nprepare both in one call"
                )
            group["params"] = [now[name] for name in names]
    if carried is not None:
        carried()


def _prepared(run: Run, kind: str | None, thing: Any) -> Any:
    if kind == "model":
        unit = run.unit_of_model(thing)
        assert unit is not None
        return thing if thing in unit.wrapped else unit.wrapped[unit.given.index(thing)]
    if kind == "optimizer":
        return thing if isinstance(thing, PreparedOptimizer) else run.proxy_of(thing)
    if kind == "scheduler":
        return thing if isinstance(thing, PreparedScheduler) else _scheduler(run, thing)
    return None


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
