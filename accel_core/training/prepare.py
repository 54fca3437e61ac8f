"""Objects become units: planned (see `plan`), checked, then built (see `build`).

Everything that can be wrong with the objects is found before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_core.data.loader import prepare_loader
from accel_core.distributed.watch import assemble
from accel_core.errors import ConfigError
from accel_core.training.build import build_unit
from accel_core.training.plan import plan_prepare
from accel_core.training.proxies import PreparedOptimizer, PreparedScheduler

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit


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
        reasons += _refuse_float64(unit, group.models, plan.placed)
        if reasons:
            raise ConfigError("\n".join(reasons), problems=reasons)
        units.append(unit)
    if plan.of_kind["model"]:
        assemble(run, "prepare", _in_words(plan.of_kind["model"], units))
    for group, unit in zip(plan.groups, units, strict=True):
        proxies = [PreparedOptimizer(wrapped, unit) for wrapped in build_unit(unit, group, plan)]
        run.add_unit(unit, group.units[1:], zip(group.optimizers, proxies, strict=True))
    made = [
        loaders[id(thing)] if kind == "dataloader" else _prepared(run, kind, thing)
        for kind, thing in plan.objects
    ]
    run.add_prepared(made, list(loaders.values()))
    return made


def _refuse_float64(unit: Unit, models: Iterable[nn.Module], placed: Mapping[int, bool]) -> list[str]:
    """Return reasons why models of float64 cannot come to the unit's device.

    A model that is not placed stays where it is, unless its strategy moves weights itself.
    """
    device = unit.run.device
    if "float64" in unit.hooks.capabilities(device):
        return []
    offers = unit.run.cards[unit.strategy].offers
    is_moved = "whole_weights" not in offers or "streamed_weights" in offers
    reasons = []
    for model in models:
        tensors = (*model.named_parameters(), *model.named_buffers())
        names = [
            name
            for name, tensor in tensors
            if tensor.dtype in (torch.float64, torch.complex128)
            and (is_moved or placed.get(id(model), True) or tensor.device.type == device.type)
        ]
        if names:
            remedy = "" if is_moved else ", or leave it where it is: device_placement=[False]"
            reasons.append(
                f"prepare: {', '.join(names[:5])} of the {type(model).__name__} is float64, which {device}"
                f" lacks\nconvert the model first: model.float(){remedy}"
            )
    return reasons


def _in_words(models: Sequence[nn.Module], units: Sequence[Unit]) -> str:
    """Describe what all ranks must share; parts of a model may differ by rank."""
    if any(unit.mesh is not None and unit.mesh.size(*unit.mesh.names("model")) > 1 for unit in units):
        return f"{len(models)} model(s)"
    dtypes = [sorted(map(str, {parameter.dtype for parameter in model.parameters()})) for model in models]
    named = zip(models, dtypes, strict=True)
    words = ", ".join(f"{type(model).__name__} ({', '.join(names)})" for model, names in named)
    return words.replace("torch.", "")


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
