"""Answers of torch.xpu and torch.distributed on a machine with one Max GPU, for the simulated device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from accel_testing import Recorder

xpu = Recorder(pytest.MonkeyPatch(), torch.xpu)
xpu.answers("is_bf16_supported", answer=True)
xpu.answers("get_device_capability", {"has_fp64": True})
Recorder(pytest.MonkeyPatch(), dist).answers("is_xccl_available", answer=True)
