"""XpuDevice itself, on the kit's simulated device: torch lends the name xpu to no simulation."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from accel_core import World, hooks, implements
from accel_core.testing.simulated.device import simulate
from accel_xpu.device import XpuDevice

simulate("simxpu", "simxccl")
torch.xpu.is_bf16_supported = lambda including_emulation=True: True
torch.xpu.get_device_capability = lambda device=None: {"has_fp64": True}


class SimulatedXpu(XpuDevice):
    """What has to differ: the name of the communication backend, and that each process sees one device."""

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        return super().select_device(World())

    @implements(hooks.communication_backend)
    def communication_backend(self, device: torch.device) -> Mapping[str, str]:
        return {device.type: "simxccl"}
