"""Warnings about differences from Accelerate, once per process."""

from __future__ import annotations

import os
import sys

_warned: set[str] = set()


def warn_once(text: str) -> None:
    """One line on stderr, the first time."""
    if text not in _warned and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"accel-compat: {text}\n")
    _warned.add(text)
