"""HpuDevice itself, where `habana_frameworks` is the stand-in; torch lends the name hpu to no simulation."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from accel_core import World, hooks, implements
from accel_hpu.device import HpuDevice


class SimulatedHpu(HpuDevice):
    """What has to differ: the name of the communication backend, and that each process sees one device."""

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        device: torch.device = self.below.select_device(World())
        return device

    @implements(hooks.communication_backend)
    def communication_backend(self, device: torch.device) -> Mapping[str, str]:
        super().communication_backend(device)
        return {device.type: "simhccl"}
