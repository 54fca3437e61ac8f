"""Megatron by a trainer of its own: not served; MegatronLMPlugin is, over accel-megatron."""

from __future__ import annotations

from accel_compat.refusing import unserved

__getattr__ = unserved(__name__)
