"""The simulated device as a plugin. Importing it registers the device with torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_core import hooks, implements
from accel_testing.simulated.device import simulate
from accel_testing.simulated.device_module import TOTAL_MEMORY

if TYPE_CHECKING:
    from accel_core import Run, World

__all__ = ["SimulatedDevice"]

simulate()


class SimulatedDevice:
    """One device per process; the base layer does all else."""

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        return torch.device("sim", 0)

    @implements("monitor.device_specs")
    def device_specs(self, device: torch.device) -> Mapping[str, Any]:
        return {
            "flops": {"float32": 1e12, "bfloat16": 2e12, "float16": 2e12},
            "memory": TOTAL_MEMORY,
            "bandwidth": 1e11,
            "source": "accel-testing: made up",
        }

    @implements("monitor.device_health")
    def device_health(self, device: torch.device) -> Mapping[str, Any]:
        return {"temperature": 40, "power": 20.0, "clock": 1000, "busy": 0.5, "throttled": ["made_up"]}
