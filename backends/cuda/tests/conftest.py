"""A machine of files, and a torch.cuda whose calls are checked against the real one's signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_cuda import machine


class Machine:
    """/proc and /dev of a made-up machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def driver(self, version: str = "570.86.15") -> Machine:
        file = self.root / "proc/driver/nvidia/version"
        file.parent.mkdir(parents=True)
        file.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release\n")
        return self

    def gpus(self, count: int) -> Machine:
        (self.root / "dev").mkdir(exist_ok=True)
        for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))]:
            (self.root / "dev" / name).touch()
        return self

    def wsl(self) -> Machine:
        (self.root / "dev").mkdir(exist_ok=True)
        (self.root / "dev/dxg").touch()
        return self


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with a torch for CUDA, and nothing else yet."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "torch_build", lambda: "cuda")
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    return Machine(tmp_path)


class Recorder:
    """Replaces functions of torch.cuda; a call that the real one would refuse is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def answers(self, name: str, answer: Any) -> None:
        """From now on `torch.cuda.NAME(...)` gives `answer`, or what it gives if it can be called."""
        signature = inspect.signature(getattr(torch.cuda, name))

        def recorded(*arguments: Any, **options: Any) -> Any:
            signature.bind(*arguments, **options)
            self.calls.append((name, arguments))
            return answer(*arguments) if isinstance(answer, Callable) else answer  # type: ignore[arg-type]

        self._monkeypatch.setattr(torch.cuda, name, recorded)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)
