"""Text about a run: the reasons for its stack, and its steps and epochs once objects are prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_core.training.schedules import epochs, lengths

if TYPE_CHECKING:
    from accel_core.contract.mesh import Mesh
    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit
    from accel_core.data.loader import PreparedLoader


def explain(run: Run, scheduler_steps: int = 1) -> str:
    """Return text about the stack with reasons, changed settings with origins, units and loaders.

    `scheduler_steps` is the number of steps of each scheduler per optimizer step.
    """
    return "\n".join(_lines(run, scheduler_steps))


def _lines(run: Run, scheduler_steps: int) -> Iterator[str]:
    yield f"{run.stack}, rank {run.world.rank} of {run.world.size} on {run.device}"
    for chosen in run.stack.members():
        yield f"  {chosen.record.slot} {chosen.name} ({chosen.record.origin}): {chosen.why}"
    for path, origin in sorted(run.resolved.origins.items()):
        if origin != "default":
            yield f"  {path}: set by {origin}"
    for note in run.environment_notes:
        yield f"  environment {note}"
    if run.mesh is not None:
        yield from drawn(run.mesh)
    yield f"  data: reader {run.topology.reader} of {run.topology.readers}"
    for unit in run.units:
        yield from _unit(run, unit, scheduler_steps)
    for number, loader in enumerate(run.prepared.loaders):
        yield from _loader(run, number, loader, scheduler_steps)


def drawn(mesh: Mesh) -> Iterator[str]:
    """Draw the mesh: its factors, and this rank's group along each dimension."""
    yield "  mesh: " + " × ".join(f"{dim.name} {mesh.total(dim.name)}" for dim in mesh.dims if not dim.within)
    for dim in mesh.dims:
        if dim.size > 1:
            ranks = list(map(str, mesh.group(dim.name)))
            shown = ranks if len(ranks) <= 8 else [*ranks[:3], "...", ranks[-1]]
            inner = f", within {dim.within}" if dim.within else ""
            yield f"    {dim.name} {dim.size}: ranks {' '.join(shown)}{inner}"


def _unit(run: Run, unit: Unit, scheduler_steps: int) -> Iterator[str]:
    parts = (*unit.given, *unit.optimizers, *unit.schedulers)
    yield f"unit {unit.name} ({unit.strategy}): {', '.join(type(part).__name__ for part in parts)}"
    yield from (f"  {line}" for line in unit.hooks.describe(unit))
    if not unit.optimizers:
        yield "  does not train"
        return
    size, ends = unit.window.size, run.config.accumulation.sync_with_dataloader
    early = ", fewer at the end of a loader" if ends and size > 1 else ""
    yield f"  an optimizer step: after {_count(size, 'micro-batch', 'es')} of accumulate(...){early}"
    divisor = f"divided by {size}" if size > 1 else "taken as it is"
    yield f"  loss: {divisor}; in accelerator.windows(items=...) by the items of all ranks"
    yield f"  gradients: {_traffic(run, unit)}"
    if unit.scaler is not None:
        yield "  loss scale: one for the run, updated once a window; a step that overflows is skipped"
    if unit.schedulers:
        yield f"  schedulers: {_schedule(run, scheduler_steps)}"


def _traffic(run: Run, unit: Unit) -> str:
    if run.world.size == 1:
        return "in this process alone"
    between = f"reduced between {run.world.size} processes"
    if unit.steps.reduce_gradients is not None:
        return f"{between} once a step, before they are clipped"
    if unit.steps.no_sync is None or run.config.accumulation.sync_each_batch or unit.window.size == 1:
        return f"{between} in each backward"
    return f"{between} in the backward of a step's last micro-batch only"


def _schedule(run: Run, scheduler_steps: int) -> str:
    if not run.config.step_scheduler_with_optimizer:
        return "stepped by you (step_scheduler_with_optimizer is off)"
    once = "optimizer step that was applied" if run.config.accumulation.adjust_scheduler else "micro-batch"
    if scheduler_steps != 1:
        return f"{scheduler_steps} steps for each {once}"
    return f"one step for each {once}, whatever the number of processes"


def _loader(run: Run, number: int, loader: PreparedLoader, scheduler_steps: int) -> Iterator[str]:
    size, together = run.accumulation_steps, loader.total_batch_size
    shared = f" of {together} samples over {_count(run.topology.readers, 'reader')}" if together else ""
    try:
        batches = len(loader)
    except TypeError:  # an iterable dataset without length
        yield f"loader {number}: batches{shared}; how many an epoch has is not known"
        yield from _sharing(run, loader)
        return
    effective = f" of {together * size} samples" if together else ""
    whole, rest = divmod(batches, size)
    steps, left = whole, ""
    if rest and run.config.accumulation.sync_with_dataloader:
        steps, left = whole + 1, f", the last of {_count(rest, 'micro-batch', 'es')}"
    elif rest:
        left = f", {_count(rest, 'micro-batch', 'es')} left for the next epoch's first"
    yield f"loader {number}: an epoch has {_count(batches, 'batch', 'es')}{shared}"
    yield from _sharing(run, loader)
    yield f"  trained on, an epoch makes {_count(steps, 'optimizer step')}{effective}{left}"
    for scheduler in (each for unit in run.units for each in unit.schedulers):
        for name, length in lengths(scheduler):
            if (count := epochs(run, length, batches, scheduler_steps)) is not None:
                ends = f"ends after {count:.4g} epoch(s), if it steps with the optimizer"
                yield f"  {name} of {length:g} steps {ends}"


def _sharing(run: Run, loader: PreparedLoader) -> Iterator[str]:
    if run.topology.readers > 1:
        how = {
            "index": "each reader reads its part of one order",
            "rank0": "rank 0 reads for all",
            "every": "each reader reads everything and keeps its share",
            "dataset": "the data shares itself out",
        }[loader.shared_by]
        yield f"  shared by {loader.shared_by}: {how} ({loader.shared_because})"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
