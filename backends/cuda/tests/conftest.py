"""A machine of files, and torch.cuda without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_machine import Machine

from accel_cuda import machine
from accel_testing import Recorder


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with a torch for CUDA, and nothing else yet."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "torch_build", lambda: "cuda")
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    return Machine(tmp_path)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch, torch.cuda)
