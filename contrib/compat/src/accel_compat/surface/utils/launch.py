"""What builds the command lines of workers: the launcher of accel-core does it."""

from __future__ import annotations

from accel_compat.refusing import unserved

__getattr__ = unserved(__name__)
