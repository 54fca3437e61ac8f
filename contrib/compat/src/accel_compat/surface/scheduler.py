"""What `prepare` returns for schedulers."""

from __future__ import annotations

from accel_core import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
