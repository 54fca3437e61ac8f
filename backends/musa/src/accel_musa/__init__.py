"""Moore Threads GPUs: a device plugin of accel-core.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_musa.config import MusaConfig

__all__ = ["MusaConfig"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_musa' has no attribute {name!r}", name=name)
    from accel_musa.config import MusaConfig

    return MusaConfig
