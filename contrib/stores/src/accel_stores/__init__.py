"""Stores of checkpoints by fsspec, and copies of checkpoints there: plugins of accel-core.

Importing this package imports none of its own modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_stores.config import MirrorConfig

__all__ = ["MirrorConfig"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "MirrorConfig":
        raise AttributeError(f"module 'accel_stores' has no attribute {name!r}", name=name)
    from accel_stores.config import MirrorConfig

    return MirrorConfig
