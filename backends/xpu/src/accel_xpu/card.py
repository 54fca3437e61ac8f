"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card
from accel_xpu.machine import probe, probe_ipex

__all__ = ["IPEX", "XPU"]

XPU = Card(
    name="xpu",
    slot="device",
    summary="Intel GPUs, each process on one.",
    api_version="1.0",
    priority=100,
    shadows=("native",),
    distributed_type="MULTI_XPU",
    torch_device="xpu",
    communication_backend="xccl",
    offers={
        "bf16",
        "collectives.torch",
        "float64",
        "fp16",
        "memory_stats",
        "process_per_device",
        "rng",
    },
    probe=probe,
    verify="accel_xpu.device:verify",
    visible_devices="accel_xpu.machine:visible_devices",
    config="accel_xpu.config:XpuConfig",
    implementation="accel_xpu.device:XpuDevice",
    environment_report="accel_xpu.device:environment_report",
)

IPEX = Card(
    name="ipex",
    slot="extension",
    summary="Kernels for Intel CPUs and GPUs by Intel's extension for PyTorch 2.8, its last release.",
    api_version="1.0",
    needs={"whole_weights"},
    probe=probe_ipex,
    config="accel_xpu.config:IpexConfig",
    implementation="accel_xpu.ipex:Ipex",
)
