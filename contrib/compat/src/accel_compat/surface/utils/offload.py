"""Weights on disk: not served yet."""

from __future__ import annotations

from accel_compat.refusing import unserved

__getattr__ = unserved(__name__)
