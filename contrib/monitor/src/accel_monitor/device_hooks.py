# mypy: disable-error-code="empty-body"
"""Hooks that a device's plugin implements by name, as `@implements("monitor.device_specs")`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_core import merge, spec

if TYPE_CHECKING:
    import torch

__all__ = ["device_health", "device_specs"]


@spec("everyone", merge)
def device_specs(device: torch.device) -> Mapping[str, Any]:
    """Return the peaks of this chip as its vendor states them; empty if unknown.

    flops: dtype (float64, float32, bfloat16, float16 or float8) -> FLOP/s of dense matrix products, as the
    process is set up now. memory: bytes. bandwidth: bytes/s of that memory. source: the vendor's paper that
    has them. Leave out a figure that the vendor does not state.
    """


@spec("everyone", merge)
def device_health(device: torch.device) -> Mapping[str, Any]:
    """Return the current readings of the chip's sensors; empty if it has none.

    temperature: degrees Celsius. power: watts. clock: MHz. busy: share of the last sampling interval in
    which the chip computed. throttled: reasons why its clock is reduced. memory_errors: uncorrected ones
    since its driver started. Leave out unknown readings. Called on the main process, once per second at
    most: it must neither wait nor raise.
    """
