"""Names that users gave, and classes that models take on."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["become", "did_you_mean"]


def did_you_mean(asked: object, known: Iterable[str]) -> str:
    """Return a question about similar names, if there are any."""
    found = get_close_matches(str(asked), list(known), 3)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def become(module: nn.Module, first: type, **attributes: Any) -> None:
    """Put a class before the module's own, which it keeps the name of."""
    kind: type = type(module)
    module.__class__ = _combined(first, kind)
    module.__dict__.update(attributes)


@cache
def _combined(first: type, kind: type) -> type:
    # One class for all modules of a kind: regional compilation looks for lists of blocks of one class.
    return type(kind.__name__, (first, kind), {"__module__": kind.__module__})
