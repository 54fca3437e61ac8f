"""Stands for torch_mlu: torch's type `mlu` is the kit's simulated device, under its real name.

Its functions refuse what torch_mlu's own would refuse, by the signatures in vendor.json.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from accel_testing import hold_to_signatures
from accel_testing.simulated.device import simulate

mlu = simulate("mlu", communication="cncl")
mlu.is_bf16_supported = lambda: True
mlu.get_device_properties = lambda index: SimpleNamespace(name="Simulated MLU590", major=5, minor=0)
mlu.memory_reserved = mlu.memory_allocated
hold_to_signatures(mlu, Path(__file__).parents[1] / "vendor.json")
torch.backends.mlu = SimpleNamespace(matmul=SimpleNamespace())
torch.backends.cnnl = SimpleNamespace()
