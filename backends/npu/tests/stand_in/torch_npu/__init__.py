"""Stands for torch_npu: torch's type `npu` is the kit's simulated device, under its real name.

What it has beside that is compared with torch_npu's own source in test_npu_device.py.
"""

from __future__ import annotations

import types

from accel_testing.simulated.device import simulate

npu = simulate("npu", communication="hccl")
npu.is_bf16_supported = lambda including_emulation=False: True
npu.get_device_name = lambda device_name=None: "Simulated910"
npu.set_compile_mode = lambda jit_compile=False: None
npu.utils = types.SimpleNamespace(
    get_cann_version=lambda module="CANN": "simulated", is_support_inf_nan=lambda: True
)
npu.matmul, npu.conv = types.SimpleNamespace(), types.SimpleNamespace()
