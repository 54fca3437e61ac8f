"""Answers of torch.cuda and torch.distributed on a machine with one H100, for the simulated device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from accel_testing import Recorder

cuda = Recorder(pytest.MonkeyPatch(), torch.cuda)
cuda.answers("get_device_capability", (9, 0))
cuda.answers("device_count", 1)
about = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_520_809_984, multi_processor_count=132)
cuda.answers("get_device_properties", about)
Recorder(pytest.MonkeyPatch(), dist).answers("is_nccl_available", answer=True)
