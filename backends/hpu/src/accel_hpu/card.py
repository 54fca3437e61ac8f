"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card
from accel_hpu.machine import probe

__all__ = ["HPU"]

HPU = Card(
    name="hpu",
    slot="device",
    summary="Intel Gaudi HPUs, each process on one.",
    api_version="1.0",
    priority=100,
    # Gaudi's migration toolkit pretends that its chips are CUDA devices.
    shadows=("native", "cuda"),
    distributed_type="MULTI_HPU",
    torch_device="hpu",
    communication_backend="hccl",
    compile_backend="hpu_backend",
    offers={"bf16", "collectives.torch", "fp16", "memory_stats", "process_per_device", "rng"},
    probe=probe,
    verify="accel_hpu.device:verify",
    launch_environment="accel_hpu.machine:launch_environment",
    visible_devices="accel_hpu.machine:visible_devices",
    config="accel_hpu.config:HpuConfig",
    implementation="accel_hpu.device:HpuDevice",
    environment_report="accel_hpu.device:environment_report",
)
