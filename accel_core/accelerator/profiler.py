"""Run torch's profiler, with the activities of the run's plugins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import profiler

from accel_core.contract.arguments import did_you_mean
from accel_core.errors import ConfigError

if TYPE_CHECKING:
    from accel_core.contract.config import ProfileKwargs
    from accel_core.contract.run import Run

_SETTINGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


@contextmanager
def profiling(run: Run, options: ProfileKwargs) -> Iterator[profiler.profile]:
    """Record what happens inside. Not collective."""
    names = _usual_activities(run) if options.activities is None else options.activities
    schedule = profiler.schedule(**options.schedule_option) if options.schedule_option else None
    recorder = profiler.profile(
        activities=[_activity(name) for name in names],
        schedule=schedule,
        on_trace_ready=_Ready(options, run),
        **{name: getattr(options, name) for name in _SETTINGS},
    )
    with recorder:
        yield recorder


def _usual_activities(run: Run) -> list[str]:
    kinds = ("cpu", (run.stack.device.card.profiler_activity or run.device.type).lower())
    return [it.name for it in profiler.supported_activities() if it.name.lower() in kinds]


def _activity(name: str) -> profiler.ProfilerActivity:
    activities = {it.name.lower(): it for it in profiler.supported_activities()}
    if name.lower() not in activities:
        raise ConfigError(
            f"profile.activities: torch cannot record {name!r} here{did_you_mean(name, activities)}\n"
            f"choose among {', '.join(sorted(activities))}, or leave it unset"
        )
    activity: profiler.ProfilerActivity = activities[name.lower()]
    return activity


class _Ready:
    """After each cycle: the user's own callable, and the trace `profile_RANK.json`.

    Of several cycles the later ones are `profile_RANK_1.json` and so on.
    """

    def __init__(self, options: ProfileKwargs, run: Run) -> None:
        self.options, self.run, self.cycles = options, run, count()

    def __call__(self, recorder: Any) -> None:
        if self.options.on_trace_ready is not None:
            self.options.on_trace_ready(recorder)
        if self.options.output_trace_dir is not None:
            cycle = next(self.cycles)
            folder = Path(self.options.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"profile_{self.run.world.rank}{f'_{cycle}' * bool(cycle)}.json"
            recorder.export_chrome_trace(str(path))
            self.run.hooks.noted("profile", str(path.absolute()))
