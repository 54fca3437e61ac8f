"""Data libraries that share themselves out, and mixtures of sources. An extension of accel-core.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_data.mixture import Mixture

__all__ = ["Mixture"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "Mixture":
        raise AttributeError(f"module 'accel_data' has no attribute {name!r}", name=name)
    return import_module("accel_data.mixture").Mixture
