"""The card of MpsDevice on the conformance kit's simulated device, under a device type of its own."""

from __future__ import annotations

from attrs import evolve

from accel_mps.card import MPS

CARD = evolve(
    MPS,
    name="mps-simulated",
    probe=None,
    verify=None,
    torch_device="simmps",
    implementation="simulated_mps:SimulatedMps",
)
