"""Run torch's profiler, and write a trace of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from torch import profiler

from accel_core.contract.arguments import did_you_mean, quoted
from accel_core.errors import ConfigError

if TYPE_CHECKING:
    from accel_core.contract.config import ProfileKwargs
    from accel_core.contract.run import Run

_SETTINGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


@contextmanager
def profiling(run: Run, options: ProfileKwargs) -> Iterator[profiler.profile]:
    """Record the code inside with torch's profiler. Not collective.

    If the schedule has several cycles, the later traces are `profile_RANK_1.json` and so on.
    """
    supported = {it.name.lower(): it for it in profiler.supported_activities()}
    if unknown := [name for name in options.activities or () if name.lower() not in supported]:
        hint = did_you_mean(unknown[0], supported)
        raise ConfigError(
            f"profile.activities: torch cannot record {quoted(unknown[0])} here{hint}\n"
            f"choose among {', '.join(sorted(supported))}, or leave it unset"
        )
    numbers = count()

    def write_trace(recorder: profiler.profile) -> None:
        if options.on_trace_ready is not None:
            options.on_trace_ready(recorder)
        if options.output_trace_dir is not None:
            number = next(numbers)
            name = f"profile_{run.world.rank}{f'_{number}' if number else ''}.json"
            path = Path(options.output_trace_dir, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(path))
            run.hooks.noted("profile", str(path.absolute()))

    with profiler.profile(
        activities=[supported[name.lower()] for name in options.activities or supported],
        schedule=profiler.schedule(**options.schedule_option) if options.schedule_option else None,
        on_trace_ready=write_trace,
        **{name: getattr(options, name) for name in _SETTINGS},
    ) as recorder:
        yield recorder
