"""A device plugin of accel-core to copy. Importing this package imports nothing else."""

from __future__ import annotations

__all__: list[str] = []
