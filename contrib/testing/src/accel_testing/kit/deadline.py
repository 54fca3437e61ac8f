"""Deadlines of the checks, all from one: the seconds that a world of processes may take.

`--accel-deadline` sets that one, which the machine's patience multiplies. Only one limit is fixed, because
the contract promises it: 5 ms for a probe.
"""

from __future__ import annotations

import os
from typing import Final

from accel_testing.patience import PATIENCE, patience

__all__ = ["DEADLINE", "VARIABLES", "collective_seconds", "ending_seconds", "idle_seconds", "seconds"]

DEADLINE: Final = "ACCEL_KIT_DEADLINE"
"""Variable with the value of --accel-deadline."""
VARIABLES: Final = (DEADLINE, PATIENCE)
"""The variables that a process needs to have the same deadlines."""
USUAL: Final = 60.0


def idle_seconds() -> float:
    """Return the deadline of a world on an idle machine."""
    return float(os.environ.get(DEADLINE) or USUAL)


def seconds() -> float:
    """Return the deadline of a world, a launch, or a command, on this machine."""
    return patience(idle_seconds())


def collective_seconds() -> float:
    """Return the time after which a collective gives up, well before its world."""
    return seconds() / 3


def ending_seconds() -> float:
    """Return the time for workers to end after a signal to the launcher, or a failure."""
    return seconds() / 3
