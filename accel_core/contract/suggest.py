"""Hints for misspelt words."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


def did_you_mean(word: object, known: Sequence[str] | Mapping[str, Any]) -> str:
    """`; did you mean 'x'?` for a similar known word, else empty."""
    spelt = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(word).lower(), list(spelt), 1)
    return f"; did you mean {spelt[found[0]]!r}?" if found else ""
