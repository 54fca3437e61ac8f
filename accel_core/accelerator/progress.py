"""Progress bars: on the main process, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

from accel_core.contract.world import World

__all__ = ["progress"]

T = TypeVar("T")


def progress(items: Iterable[T], description: str = "", *, total: float | None = None) -> Iterable[T]:
    """Return `items`, behind a bar on the terminal of the main process.

    On other ranks, and without a terminal, they are returned as they are.

    total: how many there are, where `items` has no length.
    """
    if World.here().rank != 0 or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description, total, console=Console(stderr=True))
