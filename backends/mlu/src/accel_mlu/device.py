"""Device plugin `mlu`: Cambricon MLUs.

Core's base layer runs the device through `torch.mlu`; this module adds the parts that are specific to the
vendor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from accel_core import hooks, implements
from accel_mlu.card import VISIBLE
from accel_mlu.config import MluConfig

if TYPE_CHECKING:
    from accel_core import Run, World

__all__ = ["MluDevice", "environment_report", "vendor", "verify"]


def vendor() -> Any:
    """Return torch_mlu's device module; importing torch_mlu registers the device type `mlu` with torch."""
    import torch_mlu  # noqa: F401

    return torch.get_device_module("mlu")


def verify() -> str | None:
    """Return the reason why torch cannot compute on an MLU here; None if it can."""
    if vendor().is_available():
        return None
    return "torch_mlu loads but finds no usable MLU; cnmon says whether the driver works"


class MluDevice:
    """Device `mlu`."""

    below: Any

    def __init__(self, config: MluConfig | None, run: Run) -> None:
        self.config = config or MluConfig()
        self.run = run
        self.mlu = vendor()

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        device: torch.device = self.below.select_device(world)
        if self.config.allow_tf32 is not None:
            switches: Any = torch.backends  # torch_mlu adds its switches here
            switches.mlu.matmul.allow_tf32 = switches.cnnl.allow_tf32 = self.config.allow_tf32
        return device

    @implements(hooks.capabilities)
    def capabilities(self, device: torch.device) -> frozenset[str]:
        capabilities: frozenset[str] = self.below.capabilities(device)
        return capabilities if self.mlu.is_bf16_supported() else capabilities - {"bf16"}


def environment_report() -> Mapping[str, str]:
    """Return lines for `accel env`."""
    mlu = vendor()
    report = {
        "torch_mlu": metadata.version("torch_mlu"),
        VISIBLE: os.environ.get(VISIBLE, "unset"),
    }
    for index in range(mlu.device_count()):
        about = mlu.get_device_properties(index)
        report[f"MLU {index}"] = f"{about.name}, capability {about.major}.{about.minor}"
    return report
