"""A stand-in for torch.xpu whose calls are checked against the real one's signatures."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch


class Recorder:
    """Replaces functions of torch.xpu; a call that the real one would refuse is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def answers(self, name: str, answer: Any, module: Any = torch.xpu) -> None:
        """From now on `torch.xpu.NAME(...)` gives `answer`."""
        signature = inspect.signature(getattr(module, name))

        def recorded(*arguments: Any, **options: Any) -> Any:
            signature.bind(*arguments, **options)
            self.calls.append((name, arguments))
            return answer

        self._monkeypatch.setattr(module, name, recorded)


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)
