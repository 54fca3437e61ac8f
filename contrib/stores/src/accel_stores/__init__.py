"""Stores of checkpoints by fsspec, and copies of checkpoints there: plugins of accel-core.

Importing this package imports none of its own modules (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_stores.bucket import Bucket
    from accel_stores.config import MirrorConfig
    from accel_stores.objects import Objects

__all__ = ["Bucket", "MirrorConfig", "Objects"]
__version__ = "0.1.0"

_HOMES: Final = {
    "Bucket": "accel_stores.bucket",
    "MirrorConfig": "accel_stores.config",
    "Objects": "accel_stores.objects",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'accel_stores' has no attribute {name!r}", name=name)
    return getattr(import_module(_HOMES[name]), name)
