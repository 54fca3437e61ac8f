"""Exponential moving averages of weights, sharded as the weights are.

An extension plugin of accel-core.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_ema.config import EMAConfig
    from accel_ema.extension import averaged

__all__ = ["EMAConfig", "averaged"]
__version__ = "0.1.0"

_HOMES: Final = {"EMAConfig": "accel_ema.config", "averaged": "accel_ema.extension"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'accel_ema' has no attribute {name!r}", name=name)
    return getattr(import_module(_HOMES[name]), name)
