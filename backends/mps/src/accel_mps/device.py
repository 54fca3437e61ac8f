"""Device plugin `mps`: the Apple GPU.

Core's base layer runs the device through `torch.mps`; this module adds the parts that are specific to the
vendor.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_core import ConfigError, hooks, implements
from accel_mps import machine
from accel_mps.config import MpsConfig

if TYPE_CHECKING:
    from accel_core import Run, RunConfig, World

__all__ = ["MpsDevice", "environment_report", "verify"]


def verify() -> str | None:
    """Return the reason why torch cannot compute on the GPU here; None if it can."""
    if torch.backends.mps.is_available():
        return None
    if not torch.backends.mps.is_built():
        return f"torch {torch.__version__} is built without Metal; install it from PyPI, for arm64"
    return "Metal offers no GPU to this process (a virtual machine, or a session without a user)"


class MpsDevice:
    """Device `mps`."""

    below: Any

    def __init__(self, config: MpsConfig | None, run: Run) -> None:
        self.config = config or MpsConfig()

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        if world.size > 1:
            raise ConfigError(
                f"device mps trains in one process, but this run has {world.size}: a Mac has one GPU\n"
                "start one process (accel launch -n 1), or choose --device cpu"
            )
        device: torch.device = self.below.select_device(world)
        if self.config.memory_fraction is not None:
            torch.mps.set_per_process_memory_fraction(float(self.config.memory_fraction))
        return device

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        variable = os.environ.get(machine.FALLBACK)
        if not self.config.cpu_fallback or variable != "0":
            return ()
        reason = (
            f"mps.cpu_fallback is set, but torch reads {machine.FALLBACK}={variable!r}\n"
            "unset the variable, or leave the option out"
        )
        return [reason]

    @implements(hooks.memory_stats)
    def memory_stats(self, device: torch.device) -> Mapping[str, int]:
        allocated, total = torch.mps.current_allocated_memory(), torch.mps.recommended_max_memory()
        return {
            "allocated": allocated,
            "reserved": torch.mps.driver_allocated_memory(),
            "total": total,
            "free": max(0, total - allocated),
        }


def environment_report() -> Mapping[str, str]:
    """Return lines for `accel env`."""
    report = {"macOS": platform.mac_ver()[0] or "unknown"}
    if torch.backends.mps.is_available():
        memory = torch.mps.recommended_max_memory() / 2**30
        name = getattr(torch.backends.mps, "get_name", platform.machine)()  # torch 2.8 cannot name it
        report["Apple GPU"] = f"{name}, {memory:.1f} GiB recommended"
    return report
