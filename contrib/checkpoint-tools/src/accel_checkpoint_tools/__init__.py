"""`accel checkpoint`: list, show, verify, export, compare and import checkpoints of accel-core.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_checkpoint_tools.live import load_accelerate, load_dcp, load_deepspeed

__all__ = ["load_accelerate", "load_dcp", "load_deepspeed"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_checkpoint_tools' has no attribute {name!r}", name=name)
    from accel_checkpoint_tools import live

    return getattr(live, name)
