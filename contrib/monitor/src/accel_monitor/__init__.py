"""The record of a run as a page, a summary or a live screen, and a comparison of what ranks hold alike.

Importing this package imports none of its modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_monitor.card import ReplicasConfig

__all__ = ["ReplicasConfig"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_monitor' has no attribute {name!r}", name=name)
    from accel_monitor import card

    return getattr(card, name)
