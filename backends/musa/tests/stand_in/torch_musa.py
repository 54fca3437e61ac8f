"""Stands for torch_musa: torch's type `musa` is the kit's simulated device, under its real name.

Its functions refuse what torch_musa's own would refuse, by the signatures in vendor.json.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from accel_testing import hold_to_signatures
from accel_testing.simulated.device import simulate

musa = simulate("musa", communication="mccl")
musa.is_bf16_supported = lambda including_emulation: True
musa.get_device_properties = lambda index: SimpleNamespace(name="Simulated S4000", major=2, minor=2)
musa.memory_reserved = musa.memory_allocated
hold_to_signatures(musa, Path(__file__).parents[1] / "vendor.json")
torch.backends.mudnn = SimpleNamespace(allow_tf32=True)
