"""The lengths of schedules, in optimizer steps and in epochs of a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from accel_core.distributed.logging import get_logger

if TYPE_CHECKING:
    from accel_core.contract.run import Run

_LENGTHS: Final = ("total_steps", "T_max", "total_iters", "total_num_steps")
"""Attributes in which schedulers keep the number of steps until they end."""
_PHASES: Final = ("num_warmup_steps", "num_stable_steps", "num_decay_steps")
"""Arguments that libraries bind to a schedule's function, if it has no `num_training_steps`."""


def lengths(scheduler: Any) -> Iterator[tuple[str, float]]:
    """Yield (class name, number of steps) of a scheduler with a known length, and of its parts."""
    found = [getattr(scheduler, name, None) for name in _LENGTHS]
    found += [_bound_length(each) for each in getattr(scheduler, "lr_lambdas", ())]
    parts, milestones = getattr(scheduler, "_schedulers", None), getattr(scheduler, "_milestones", None)
    parts = parts if isinstance(parts, list) else []  # of torch's SequentialLR and ChainedScheduler
    if parts and milestones:  # the last one begins at the last milestone
        found += [milestones[-1] + length for _, length in lengths(parts[-1])]
    for length in [each for each in found if isinstance(each, int | float) and each > 0][:1]:
        yield type(scheduler).__name__, length
    for part in parts:
        yield from lengths(part)


def _bound_length(function: Any) -> Any:
    """Return the length that a library has bound to a schedule's function, or None."""
    bound: Mapping[str, Any] = function.keywords if isinstance(function, partial) else {}
    if "num_decay_steps" in bound:
        return sum(bound.get(phase) or 0 for phase in _PHASES)
    return bound.get("num_training_steps")


def epochs(run: Run, length: float, batches: int, times: int = 1) -> float | None:
    """Return the number of epochs until a schedule ends; None if the program steps the scheduler itself.

    Args:
        run: the run whose accumulation counts.
        length: the schedule's length in scheduler steps.
        batches: batches per epoch.
        times: scheduler steps per optimizer step.
    """
    if not (batches and run.config.step_scheduler_with_optimizer):
        return None
    accumulation, steps = run.config.accumulation, float(batches)
    if accumulation.adjust_scheduler:
        steps /= run.accumulation_steps
        steps = ceil(steps) if accumulation.sync_with_dataloader else steps
    return length / (steps * times)


def warn_of_shorter_epochs(run: Run, schedulers: Iterable[Any], loaders: Iterable[tuple[Any, Any]]) -> None:
    """Warn about each schedule of whole epochs of a loader whose epochs `prepare` has made shorter.

    Only schedulers that step once per optimizer step are checked. The longest loader counts as the training
    loader, others as evaluation loaders.

    Args:
        run: the run that prepares the objects.
        schedulers: new schedulers of the `prepare` call.
        loaders: (user's loader, prepared loader) of the same call.
    """
    if not (run.config.step_scheduler_with_optimizer and run.config.accumulation.adjust_scheduler):
        return
    try:
        new = [(len(given), len(made)) for given, made in loaders if made is not given]
        longest = max(map(len, run.prepared.loaders), default=0)
    except TypeError:  # an iterable dataset without length may be the training set
        return
    before, now = max(new, default=(0, 0))
    if max(longest, 1) <= now < before:
        for scheduler in schedulers:
            for name, length in lengths(scheduler):
                if count := _whole_epochs(length, before, run.accumulation_steps):
                    _warn(run, name, length, count, now)
                    break  # one warning for a scheduler and its parts


def _whole_epochs(length: float, batches: int, size: int) -> int:
    """Return the number of epochs that a length in optimizer steps covers; 0 if not a whole number.

    Programs compute the length as epochs * ceil(batches / size) or as epochs * batches // size, with windows
    of `size` micro-batches.
    """
    steps, count = ceil(batches / size), ceil(length * size / batches)
    if length % steps == 0:
        return int(length // steps)
    return count if count * batches // size == length else 0


def _warn(run: Run, name: str, length: float, count: int, now: int) -> None:
    size = run.accumulation_steps
    get_logger(__name__).warning(
        "prepare: the %s is %d optimizer steps long, %d epoch(s) of its loader before prepare and %.3g now:"
        " %d processes share the batches of an epoch, and schedulers step once per optimizer step; prepare"
        " the loader first, loader = accelerator.prepare(loader), and then make the scheduler for %d * %s"
        " steps",
        *(name, length, count, epochs(run, length, now), run.topology.readers, count),
        "len(loader)" if size == 1 else f"math.ceil(len(loader) / {size})",
    )
