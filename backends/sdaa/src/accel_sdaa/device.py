"""Device plugin `sdaa`: Tecorigin SDAA devices, unverified.

Core's base layer runs the device through `torch.sdaa`; this module adds the parts that are specific to the
vendor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_core import hooks, implements
from accel_sdaa.card import VISIBLE

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["SdaaDevice", "environment_report", "vendor", "verify"]


def vendor() -> Any:
    """Return torch_sdaa's device module; importing torch_sdaa registers the device type `sdaa` with torch."""
    import torch_sdaa  # noqa: F401

    return torch.get_device_module("sdaa")


def verify() -> str | None:
    """Return the reason why torch cannot compute on an SDAA device here; None if it can."""
    if vendor().is_available():
        return None
    return "torch_sdaa loads but finds no usable device; teco-smi says whether the driver works"


class SdaaDevice:
    """Device `sdaa`."""

    below: Any

    def __init__(self, config: None, run: Run) -> None:
        self.run = run
        self.sdaa = vendor()

    @implements(hooks.capabilities)
    def capabilities(self, device: torch.device) -> frozenset[str]:
        capabilities: frozenset[str] = self.below.capabilities(device)
        return capabilities if self.sdaa.is_bf16_supported() else capabilities - {"bf16"}


def environment_report() -> Mapping[str, str]:
    """Return lines for `accel env`."""
    sdaa = vendor()
    report = {VISIBLE: os.environ.get(VISIBLE, "unset")}
    if sdaa.device_count():
        report["SDAA"] = f"{sdaa.device_count()} x {sdaa.get_device_name()}"
    return report
