"""The card of XpuDevice on the conformance kit's simulated device, under a device type of its own."""

from __future__ import annotations

from attrs import evolve

from accel_xpu.card import XPU

CARD = evolve(
    XPU,
    name="xpu-simulated",
    probe=None,
    verify=None,
    torch_device="simxpu",
    implementation="simulated_xpu:SimulatedXpu",
)
