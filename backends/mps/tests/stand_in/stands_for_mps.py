"""Answers of torch.mps on a Mac, from the simulated device."""

from __future__ import annotations

import pytest
import torch

from accel_testing import Recorder
from accel_testing.simulated.device import module

mps = Recorder(pytest.MonkeyPatch(), torch.mps)
mps.answers("current_allocated_memory", lambda: module().memory_allocated())
mps.answers("driver_allocated_memory", lambda: module().memory_allocated())
mps.answers("recommended_max_memory", 2**34)
