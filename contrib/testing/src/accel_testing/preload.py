"""The part of core that nearly each worker needs, imported once for all."""

from __future__ import annotations

from accel_core import Accelerator

__all__ = ["Accelerator"]
