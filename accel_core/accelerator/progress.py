"""Progress bars: one, on the main process, and only where somebody looks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

from accel_core.contract.world import World

__all__ = ["progress"]

T = TypeVar("T")


def progress(items: Iterable[T], description: str = "", *, total: float | None = None) -> Iterable[T]:
    """`items`, behind a bar on the terminal; on other ranks and off a terminal, as they are.

    total: how many there are, where `items` has no length.
    """
    if World.here().rank != 0 or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description, total, console=Console(stderr=True))
