"""Arguments of callers: whole numbers of any library, misspelt words, and values in messages."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any


def whole_number(given: Any, least: float = 0) -> int | None:
    """Return Python's number for a whole one of any library.

    None for another value, True and what numpy has masked among them, and for a number below `least`.
    """
    is_flag = isinstance(given, bool) or str(getattr(given, "dtype", "")) in ("bool", "torch.bool")
    is_masked = str(getattr(given, "mask", "")) == "True"
    try:
        number = None if is_flag or is_masked else operator.index(given)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without a value
        return None
    return number if number is not None and number >= least else None


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
