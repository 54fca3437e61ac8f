"""XLA devices (TPUs and the other devices of torch_xla): plugins of accel-core.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_xla.config import SpmdConfig, XlaConfig

__all__ = ["SpmdConfig", "XlaConfig"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_xla' has no attribute {name!r}", name=name)
    from accel_xla import config

    return getattr(config, name)
