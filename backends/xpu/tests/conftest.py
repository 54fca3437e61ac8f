"""torch.xpu without such a device."""

from __future__ import annotations

import pytest
import torch

from accel_testing import Recorder


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch, torch.xpu)
