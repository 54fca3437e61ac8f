"""Misspelt words, and values in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def quoted(value: object) -> str:
    """Return a value for a message: its repr, of at most 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def did_you_mean(word: object, known: Sequence[str] | Mapping[str, Any]) -> str:
    """`; did you mean 'x'?` for a similar known word, else empty."""
    import difflib  # late: most words are spelt right

    spelt = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(word).lower(), list(spelt), 1)
    return f"; did you mean {spelt[found[0]]!r}?" if found else ""
