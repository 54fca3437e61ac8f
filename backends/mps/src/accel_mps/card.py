"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card
from accel_mps.machine import probe

__all__ = ["MPS"]

MPS = Card(
    name="mps",
    slot="device",
    summary="The GPU of an Apple chip, for one process.",
    api_version="1.0",
    priority=100,
    shadows=("native",),
    distributed_type="MPS",
    torch_device="mps",
    offers={"bf16", "fp16", "memory_stats", "rng"},
    probe=probe,
    verify="accel_mps.device:verify",
    launch_environment="accel_mps.machine:launch_environment",
    visible_devices="accel_mps.machine:visible_devices",
    config="accel_mps.config:MpsConfig",
    implementation="accel_mps.device:MpsDevice",
    environment_report="accel_mps.device:environment_report",
)
