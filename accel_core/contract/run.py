"""The open runs of this process."""

from __future__ import annotations

import weakref

from accel_core.contract.unit import Run
from accel_core.errors import AccelError

__all__ = ["Run", "current", "live", "live_runs"]

live_runs: weakref.WeakSet[Run] = weakref.WeakSet()


def live() -> list[Run]:
    """Return the runs of this process that have not ended."""
    return list(live_runs)


def current() -> Run:
    """Return the only live run.

    Raises:
        AccelError: no run or several runs are live.
    """
    runs = live()
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise AccelError("there is no Accelerator yet\nmake one first: accelerator = Accelerator()")
    listed = ", ".join(sorted(str(run.stack) for run in runs))
    raise AccelError(f"there are {len(runs)} live runs ({listed})\nsay which: pass run=accelerator.run")
