"""Stores of checkpoints by fsspec: a plugin of accel-core."""

from __future__ import annotations

__all__: list[str] = []
__version__ = "0.1.0"
