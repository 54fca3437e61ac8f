"""What differs from Accelerate is said once a process, on the main rank."""

from __future__ import annotations

import os
import sys

__all__ = ["say_once"]

_said: set[str] = set()


def say_once(text: str) -> None:
    """One line on stderr, the first time."""
    if text not in _said and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"accel-compat: {text}\n")
    _said.add(text)
