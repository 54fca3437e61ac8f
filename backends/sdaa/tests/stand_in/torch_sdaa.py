"""Stands for torch_sdaa: torch's type `sdaa` is the kit's simulated device, under its real name.

Its functions refuse calls that neither Accelerate nor DeepSpeed makes, by vendor.json.
"""

from __future__ import annotations

from pathlib import Path

from accel_testing import hold_to_signatures
from accel_testing.simulated.device import simulate

sdaa = simulate("sdaa", communication="tccl")
sdaa.is_bf16_supported = lambda: True
sdaa.get_device_name = lambda: "/dev/tcaicard0"
sdaa.memory_reserved = sdaa.memory_allocated
hold_to_signatures(sdaa, Path(__file__).parents[1] / "vendor.json")
