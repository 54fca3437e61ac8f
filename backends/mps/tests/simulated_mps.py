"""MpsDevice itself, on the kit's simulated device: torch lends the name mps to no simulation."""

from __future__ import annotations

import torch

from accel_core import World, hooks, implements
from accel_core.testing.simulated.device import simulate
from accel_mps.device import MpsDevice

device = simulate("simmps")
torch.mps.current_allocated_memory = device.memory_allocated
torch.mps.driver_allocated_memory = device.memory_allocated
torch.mps.recommended_max_memory = lambda: 2**34


class SimulatedMps(MpsDevice):
    """What has to differ: the device's type."""

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        super().select_device(world)
        return torch.device("simmps", 0)
