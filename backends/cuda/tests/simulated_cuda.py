"""CudaDevice itself, where torch.cuda is the simulated device's module. One a process."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from accel_core import World, hooks, implements
from accel_core.testing.simulated.device import simulate
from accel_cuda.device import CudaDevice

torch.cuda.device_count = simulate("simcuda", "simnccl").device_count
torch.cuda.get_device_capability = lambda device=None: (9, 0)


class SimulatedCuda(CudaDevice):
    """What has to differ: the name of the communication backend, and that each process sees one device."""

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        return super().select_device(World())

    @implements(hooks.communication_backend)
    def communication_backend(self, device: torch.device) -> Mapping[str, str]:
        return {device.type: "simnccl"}
