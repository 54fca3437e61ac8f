"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card
from accel_cuda.machine import probe

__all__ = ["CUDA"]

CUDA = Card(
    name="cuda",
    slot="device",
    summary="NVIDIA and AMD GPUs, each process on one.",
    api_version="1.0",
    priority=100,
    shadows=("native",),
    distributed_type="MULTI_GPU",
    torch_device="cuda",
    communication_backend="nccl",
    offers={
        "bf16",
        "collectives.torch",
        "float64",
        "fp16",
        "fp8",
        "memory_stats",
        "process_per_device",
        "rng",
    },
    probe=probe,
    verify="accel_cuda.device:verify",
    launch_environment="accel_cuda.machine:launch_environment",
    visible_devices="accel_cuda.machine:visible_devices",
    config="accel_cuda.config:CudaConfig",
    implementation="accel_cuda.device:CudaDevice",
    environment_report="accel_cuda.device:environment_report",
)
