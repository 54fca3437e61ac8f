"""Write to stderr without ever raising."""

from __future__ import annotations

import sys
from contextlib import suppress


def tell(text: str) -> None:
    """Write to stderr; any error is ignored.

    `sys.stderr` may be None, closed, a pipe without a reader, a full disk, or an object of the user's own.
    """
    with suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def is_terminal() -> bool:
    """Return whether stderr is a terminal."""
    with suppress(Exception):
        return sys.stderr.isatty()
    return False
