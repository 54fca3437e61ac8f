"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card
from accel_npu.machine import probe

__all__ = ["NPU"]

NPU = Card(
    name="npu",
    slot="device",
    summary="Ascend NPUs, each process on one.",
    api_version="1.0",
    priority=100,
    # torch_npu can pretend that its chips are CUDA devices (torch_npu.contrib.transfer_to_npu).
    shadows=("native", "cuda"),
    distributed_type="MULTI_NPU",
    torch_device="npu",
    communication_backend="hccl",
    compile_backend="npu",
    offers={"bf16", "collectives.torch", "fp16", "memory_stats", "process_per_device", "rng"},
    probe=probe,
    verify="accel_npu.device:verify",
    launch_environment="accel_npu.machine:launch_environment",
    visible_devices="accel_npu.machine:visible_devices",
    config="accel_npu.config:NpuConfig",
    implementation="accel_npu.device:NpuDevice",
    environment_report="accel_npu.device:environment_report",
)
