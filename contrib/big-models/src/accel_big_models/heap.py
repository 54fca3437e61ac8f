"""Freed memory that the C library keeps, given back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can.

    glibc keeps freed pieces of up to 32 MB for itself. A process that reads a checkpoint block by block would
    grow about as the file does. A call takes milliseconds.
    """
    if (trim := _function()) is not None:
        trim(0)


@cache
def _function() -> Any:
    """Return glibc's `malloc_trim`; None elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
