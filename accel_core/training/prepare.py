"""Objects become units: planned (see `plan`), then placed, wrapped and rebound.

Everything that can be wrong with the objects is found before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel_core.contract.hooks import PHASES
from accel_core.contract.unit import own_name
from accel_core.data.loader import prepare_loader
from accel_core.distributed.progress import show_progress
from accel_core.distributed.streams import fork, forward_context
from accel_core.distributed.watch import assemble
from accel_core.errors import AccelError, ConfigError
from accel_core.training.autocast import attach
from accel_core.training.compile import inside
from accel_core.training.gradients import attach_gradient_transforms
from accel_core.training.plan import plan_prepare, refuse_float64
from accel_core.training.prior_state import carry
from accel_core.training.proxies import PreparedOptimizer, PreparedScheduler

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit
    from accel_core.training.plan import PreparePlan, UnitGroup

Named = list[tuple[str, str, Any]]
"""(name in the model as it is, the user's name, tensor or module)."""


def prepare(
    run: Run,
    objects: Sequence[Any],
    *,
    strategy: str | None = None,
    name: str | None = None,
    placement: Sequence[bool] | None = None,
) -> list[Any]:
    """Return the prepared form of each object, in the order given. Collective.

    Raises:
        AccelError, ConfigError: see `plan_prepare`; or a plugin refuses the objects.
    """
    run.require_alive()
    plan = plan_prepare(run, objects, strategy=strategy, name=name, placement=placement)
    loaders = {
        id(loader): prepare_loader(loader, run, plan.placed[id(loader)])
        for loader in plan.of_kind["dataloader"]
    }
    units: list[Unit] = []
    for group in plan.groups:
        unit = group.units[0] if group.units else run.make_unit(name, strategy, units)
        reasons = [*unit.hooks.refuse_unit(unit, group.models, group.optimizers)]
        reasons += refuse_float64(unit, group.models, plan.placed)
        if reasons:
            raise ConfigError("\n".join(reasons), problems=reasons)
        units.append(unit)
    if plan.of_kind["model"]:
        assemble(run, "prepare", _in_words(plan.of_kind["model"], units))
    for group, unit in zip(plan.groups, units, strict=True):
        models = " and ".join(type(model).__name__ for model in group.models)
        with _all_or_nothing(run, unit), show_progress(f"preparing {models} for {unit.strategy}"):
            _build(unit, group, plan)
        wrapped = unit.optimizers[len(unit.optimizers) - len(group.optimizers) :]
        proxies = [PreparedOptimizer(inner, unit) for inner in wrapped]
        run.add_unit(unit, group.units[1:], zip(group.optimizers, proxies, strict=True))
    made = [
        loaders[id(thing)] if kind == "dataloader" else _prepared(run, kind, thing)
        for kind, thing in plan.objects
    ]
    run.add_prepared(made, list(loaders.values()))
    return made


def _in_words(models: Sequence[nn.Module], units: Sequence[Unit]) -> str:
    """Describe what all ranks must share; parts of a model may differ by rank."""
    if any(unit.mesh is not None and unit.mesh.size(*unit.mesh.names("model")) > 1 for unit in units):
        return f"{len(models)} model(s)"
    dtypes = [sorted(map(str, {parameter.dtype for parameter in model.parameters()})) for model in models]
    named = zip(models, dtypes, strict=True)
    words = ", ".join(f"{type(model).__name__} ({', '.join(names)})" for model, names in named)
    return words.replace("torch.", "")


@contextmanager
def _all_or_nothing(run: Run, unit: Unit) -> Iterator[None]:
    """Leave a unit that could not be built as it was before."""
    before, parameters = unit.snapshot(), run.parameters.snapshot()
    attached = {id(detach) for other in (unit, *run.units) for detach in other.detach}
    try:
        yield
    except BaseException:  # a plugin's, of any kind: it goes on
        for detach in unit.detach:  # those of units that were to join stay
            if id(detach) not in attached:
                detach()
        unit.restore(before)
        run.parameters.restore(parameters)
        raise


def _build(unit: Unit, group: UnitGroup, plan: PreparePlan) -> None:
    """Take the group's objects into the unit: transformed, placed and wrapped."""
    hooks, parameters = unit.hooks, unit.run.parameters
    for other in group.units[1:]:
        unit.merge(other)
    numbers = unit.add_models(group.models, map(inside, group.models))
    original = dict(unit.all_names())
    before = {number: _names(unit.models[number]) for number in numbers}
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


def _build_whole(unit: Unit, group: UnitGroup, plan: PreparePlan, before: Mapping[int, Named]) -> None:
    """Build by a strategy that makes models, optimizers and schedulers one thing."""
    hooks, loaders = unit.hooks, plan.of_kind["dataloader"]
    unit.schedulers.extend(
        scheduler
        for scheduler in plan.of_kind["scheduler"]
        if any(scheduler.optimizer is optimizer for optimizer in unit.optimizers)
    )
    unit.configure(hooks.complete(unit.run.configs[unit.strategy], unit, loaders))
    for number, names in before.items():
        unit.models[number] = inner = inside(_transform(unit, unit.given[number]))
        unit.renamed[inner] = _renamed(names, inner)
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


def _finish_model(unit: Unit, number: int, before: Named) -> None:
    """After wrapping: the last phase, the module inside, its names, its autocast."""
    hooks, run = unit.hooks, unit.run
    unit.wrapped[number] = wrapped = hooks.transform_model(unit, unit.wrapped[number], PHASES[-1])
    unit.models[number] = inner = inside(hooks.unwrap_model(unit, wrapped, True))
    unit.renamed[inner] = {**_renamed(before, inner), **unit.renamed.get(inner, {})}
    attach_gradient_transforms(unit, number)
    unit.use_stream(unit.stream or fork(unit))
    context = forward_context(unit, hooks.autocast(unit))
    detach = attach(inner, context, run.device.type, outputs_to_fp32=run.config.autocast.outputs_to_fp32)
    if detach is not None:
        unit.detach.append(detach)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """All named parts of the model: tensors, and modules that may hold more state."""
    yield from model.named_modules(remove_duplicate=False)
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _names(model: nn.Module) -> Named:
    return [(name, own_name(model, name), tensor) for name, tensor in _tensors(model)]


def _renamed(before: Named, model: nn.Module) -> dict[str, str]:
    """Return tensors' names in the transformed or wrapped model -> the user's names."""
    names: dict[int, list[str]] = {}
    for _, name, tensor in before:
        names.setdefault(id(tensor), []).append(name)
    old = {name for name, _, _ in before}
    new = [(name, tensor) for name, tensor in _tensors(model) if name not in old]
    return {name: names[id(tensor)].pop(0) for name, tensor in new if names.get(id(tensor))}


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


def _prepared(run: Run, kind: str | None, thing: Any) -> Any:
    """Return `prepare`'s result for a model, optimizer or scheduler of a built unit."""
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
    unit.schedulers[:] = [other for other in unit.schedulers if other is not scheduler]
    inner = unit.hooks.wrap_scheduler(unit, scheduler)
    unit.schedulers.append(inner)
    return PreparedScheduler(
        inner,
        [optimizer],
        follows=run.config.step_scheduler_with_optimizer,
        each_micro_batch=not run.config.accumulation.adjust_scheduler,
    )
