"""`prepare`: plan the units of the objects (see `plan`), check them, then build the units (see `build`).

All checks that need no built unit come before the first change. Plugins may refuse while they build;
the unit is then as it was before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from accel_core.data.loader import prepare_loader
from accel_core.training.build import build_unit
from accel_core.training.plan import kind_of, plan_prepare
from accel_core.training.proxies import prepare_scheduler

if TYPE_CHECKING:
    from accel_core.contract.run import Run


def prepare(
    run: Run,
    objects: Sequence[Any],
    *,
    strategy: str | None = None,
    name: str | None = None,
    placement: Sequence[bool | None] | None = None,
    scheduler_steps: int = 1,
    already_sharded: bool | None = None,
) -> list[Any]:
    """Return the prepared form of each object, in the order of the arguments. Collective.

    Args:
        run: the run that prepares the objects.
        objects: the arguments of `Accelerator.prepare`.
        strategy: alias of the strategy; None: the run's default.
        name: name of the unit.
        placement: whether each object is moved to the device; None: as the config says.
        scheduler_steps: scheduler steps per optimizer step.
        already_sharded: whether each rank's loader has its own part of the data; None: as the config says.

    Raises:
        AccelError, ConfigError: see `plan_prepare`; or a plugin refuses the objects.
    """
    run.require_alive()
    prepared = run.prepared
    places = _places(placement, len(objects), run.config.device_placement)
    plan = plan_prepare(prepared, objects, partial(kind_of, run), places, strategy=strategy, name=name)
    for number, group in enumerate(plan.groups):
        if not group.units:
            earlier = [other.unit for other in plan.groups[:number]]
            group.units.append(run.make_unit(name, strategy, earlier))
        group.check_unit(plan.placed)
    loaders: dict[int, Any] = {
        id(loader): prepare_loader(loader, run, plan.placed[id(loader)], already_sharded)
        for loader in plan.of_kind["dataloader"]
    }
    if run.world.size > 1:
        from accel_core.distributed.together import agree_on_call  # late: only several ranks need it

        brings = [plan.in_words(), *(f"{word!r}" for word in (name, strategy) if word is not None)]
        brings += filter(None, (loader.data_in_words for loader in loaders.values()))
        agree_on_call(run, "prepare", ", ".join(brings))
    for group in plan.groups:
        build_unit(group, plan, prepared)
    for scheduler, optimizer in plan.schedules:
        stepped = plan.engine_schedulers.get(id(scheduler), scheduler)
        proxy = prepare_scheduler(stepped, prepared.proxy_of(optimizer))
        prepared.schedulers.append((scheduler, proxy))
    if plan.schedules and loaders and scheduler_steps == 1:
        from accel_core.training.schedules import warn_of_shorter_epochs  # late: few calls need it

        given = [loader for loader in plan.of_kind["dataloader"] if isinstance(loader, DataLoader)]
        pairs = [(loader, loaders[id(loader)]) for loader in given]
        warn_of_shorter_epochs(run, [scheduler for scheduler, _ in plan.schedules], pairs)
    results: list[Any] = prepared.add_results(plan.objects, loaders)
    return results


def _places(asked: Any, count: int, usual: bool) -> list[bool]:
    """Return whether to place each object; `usual` stands for None."""
    if asked is None:
        return [usual] * count
    return [usual if place is None else place for place in asked]
