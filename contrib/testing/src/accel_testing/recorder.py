"""Stand-ins for a vendor's functions that refuse what the real ones would refuse."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["Recorder"]


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
