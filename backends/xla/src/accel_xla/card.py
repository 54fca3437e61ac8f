"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card
from accel_xla.machine import hardware, probe

__all__ = ["XLA", "XLA_DP", "XLA_SPMD"]

XLA = Card(
    name="xla",
    slot="device",
    summary="TPUs and Neuron cores by torch_xla 2.9, the vendor's last; for newer torch see torch_tpu.",
    api_version="1.0",
    # Every installation of torch_xla has a CPU device, which `auto` must not prefer to other devices.
    priority=100 if hardware() else None,
    distributed_type="XLA",
    torch_device="xla",
    offers={"bf16", "collectives.own", "float64", "memory_stats", "process_per_device", "rng"},
    probe=probe,
    verify="accel_xla.device:verify",
    launch_environment="accel_xla.machine:launch_environment",
    visible_devices="accel_xla.machine:visible_devices",
    config="accel_xla.config:XlaConfig",
    implementation="accel_xla.device:XlaDevice",
    environment_report="accel_xla.device:environment_report",
)
XLA_DP = Card(
    name="xla-dp",
    slot="strategy",
    summary="Each XLA device's process trains a copy of the model; gradients are averaged once a step.",
    api_version="1.0",
    priority=100,
    distributed_type="XLA",
    offers={
        *("no_sync", "local_sgd", "several_optimizers", "whole_weights"),
        *("freezing", "unfreezing", "replacing", "regrouping", "partial_clips"),
    },
    needs={"collectives.own", "process_per_device"},
    probe=probe,
    implementation="accel_xla.data_parallel:XlaDataParallel",
)
XLA_SPMD = Card(
    name="xla-spmd",
    slot="strategy",
    summary="One process drives all devices of its host; XLA's compiler spreads model and batch over them.",
    api_version="1.0",
    distributed_type="XLA",
    offers={
        *("no_sync", "several_optimizers"),
        *("freezing", "unfreezing", "replacing", "regrouping", "closures", "partial_clips"),
    },
    probe=probe,
    launch_environment="accel_xla.machine:spmd_environment",
    dimensions={
        "dp_replicate": "Replicated data parallelism: groups of devices, each with all parameters; unset: 1.",
        "dp_shard": "Fully sharded data parallelism (FSDPv2): devices that share parameters; unset: all.",
    },
    config="accel_xla.config:SpmdConfig",
    implementation="accel_xla.spmd:Spmd",
)
