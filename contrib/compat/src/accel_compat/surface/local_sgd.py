"""Local SGD."""

from __future__ import annotations

from accel_core import LocalSGD

__all__ = ["LocalSGD"]
