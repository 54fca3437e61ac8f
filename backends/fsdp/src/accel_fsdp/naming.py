"""Names that users gave."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean"]


def did_you_mean(asked: object, known: Iterable[str]) -> str:
    """Return a question about similar names, if there are any."""
    found = get_close_matches(str(asked), list(known), 3)
    return f"; did you mean {' or '.join(found)}?" if found else ""
