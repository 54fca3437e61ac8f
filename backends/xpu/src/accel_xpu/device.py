"""Device plugin `xpu`: Intel GPUs.

Core's base layer runs the device through `torch.xpu`; this module adds the parts that are specific to the
vendor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core import hooks, implements
from accel_xpu import machine
from accel_xpu.config import XpuConfig

if TYPE_CHECKING:
    from accel_core import Run, RunConfig, World

__all__ = ["XpuDevice", "environment_report", "verify"]

logger = logging.getLogger(__name__)


def verify() -> str | None:
    """Return the reason why torch cannot compute on an Intel GPU here; None if it can."""
    if torch.xpu.is_available():
        return None
    return (
        f"torch {torch.__version__} finds no usable Intel GPU ({machine.VISIBLE}="
        f"{os.environ.get(machine.VISIBLE, 'unset')}); sycl-ls says whether the Level Zero driver works"
    )


class XpuDevice:
    """Device `xpu`."""

    below: Any

    def __init__(self, config: XpuConfig | None, run: Run) -> None:
        self.config = config or XpuConfig()
        self.run = run

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        device: torch.device = self.below.select_device(world)
        if self.config.tf32 is not None:
            torch.backends.mkldnn.allow_tf32 = self.config.tf32  # type: ignore[assignment]  # torch types its class
        if self.config.numa_affinity:
            self._pin(device.index or 0)
        return device

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        reasons = [*machine.conflicts(self.config)]
        if self.run.world.size > 1 and not (config.process_group.backend or dist.is_xccl_available()):
            reasons.append(
                f"torch {torch.__version__} was built without XCCL, which carries tensors between its GPUs\n"
                "install a torch that has it (2.8 and later), or train in one process: accel launch -n 1"
            )
        return reasons

    @implements(hooks.capabilities)
    def capabilities(self, device: torch.device) -> frozenset[str]:
        capabilities: frozenset[str] = self.below.capabilities(device)
        unsupported = set() if torch.xpu.is_bf16_supported(including_emulation=False) else {"bf16"}
        # Arc chips emulate float64, or refuse it.
        if not torch.xpu.get_device_capability(device).get("has_fp64", True):
            unsupported.add("float64")
        return capabilities - unsupported

    def _pin(self, index: int) -> None:
        """Pin this process to the CPUs nearest its GPU."""
        if not hasattr(os, "sched_setaffinity"):
            logger.warning("CPU affinity is left as it is: this operating system has none")
            return
        uuid = torch.xpu.get_device_properties(index).uuid
        # CPUs that the process may not use (taskset, a container's limit) are left out.
        near = machine.cpus_near(bytes(getattr(uuid, "bytes", uuid))) & os.sched_getaffinity(0)
        if not near:
            logger.warning("CPU affinity is left as it is: no usable CPU is known to be near this GPU")
            return
        os.sched_setaffinity(0, near)


def environment_report() -> Mapping[str, str]:
    """Return lines for `accel env`."""
    report = {
        "XPU of torch": str(torch.version.xpu),
        machine.VISIBLE: os.environ.get(machine.VISIBLE, "unset"),
    }
    for index in range(torch.xpu.device_count()):
        about = torch.xpu.get_device_properties(index)
        report[f"XPU {index}"] = f"{about.name}, {about.total_memory / 2**30:.1f} GiB"
    return report
