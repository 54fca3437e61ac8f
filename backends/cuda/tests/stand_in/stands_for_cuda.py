"""Answers of torch.cuda and torch.distributed on a machine with one H100, for the simulated device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from accel_testing import Recorder

cuda = Recorder(pytest.MonkeyPatch(), torch.cuda)
cuda.answers("get_device_capability", (9, 0))
cuda.answers("device_count", 1)
Recorder(pytest.MonkeyPatch(), dist).answers("is_nccl_available", answer=True)
