"""Stand-ins for a vendor's functions that refuse what the real ones would refuse."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["Recorder", "hold_to_signatures"]


class Recorder:
    """Replaces functions of a module for one test, and checks their arguments.

    calls: (name, positional arguments), in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self._monkeypatch, self._module = monkeypatch, module
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def answers(self, name: str, answer: Any) -> None:
        """Make the function `name` return `answer`, or call `answer`."""
        signature = inspect.signature(getattr(self._module, name))

        def recorded(*arguments: Any, **options: Any) -> Any:
            signature.bind(*arguments, **options)
            self.calls.append((name, arguments))
            return answer(*arguments) if callable(answer) else answer

        self._monkeypatch.setattr(self._module, name, recorded)


def hold_to_signatures(stand_in: Any, record: Path, names: Iterable[str] | None = None) -> None:
    """Make functions of a stand-in refuse the calls that a vendor's functions refuse.

    Args:
        stand_in: a module or an object; its functions are replaced.
        record: JSON with the signatures of the vendor's source, where that cannot be imported:
            `{"functions": {FILE: {NAME: PARAMETERS}}}`, parameters as Python code, without annotations.
        names: of the functions; by default all that are recorded.

    Raises:
        KeyError: the vendor has no such function.
        AttributeError: the stand-in has no such function.
    """
    files = json.loads(record.read_text(encoding="utf-8"))["functions"].values()
    recorded = {name: parameters for functions in files for name, parameters in functions.items()}
    for name in recorded if names is None else names:
        signature = inspect.signature(eval(f"lambda {recorded[name]}: None"))  # noqa: S307 - a file of the tests
        setattr(stand_in, name, _bound(getattr(stand_in, name), signature))


def _bound(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        signature.bind(*arguments, **options)
        return function(*arguments, **options)

    return called
