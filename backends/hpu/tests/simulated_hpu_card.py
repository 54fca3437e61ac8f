"""The card of HpuDevice on the conformance kit's simulated device, under a device type of its own."""

from __future__ import annotations

from attrs import evolve

from accel_hpu.card import HPU

CARD = evolve(
    HPU,
    name="hpu-simulated",
    probe=None,
    verify=None,
    torch_device="simhpu",
    implementation="simulated_hpu:SimulatedHpu",
)
