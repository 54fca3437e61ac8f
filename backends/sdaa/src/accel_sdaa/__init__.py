"""Tecorigin SDAA devices: a device plugin of accel-core, unverified.

Importing this package imports nothing else.
"""

from __future__ import annotations

__all__: list[str] = []
__version__ = "0.1.0"
