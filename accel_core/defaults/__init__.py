"""Cards of the default plugins, found through entry points like any other."""

from __future__ import annotations

from accel_core.contract.card import API_VERSION, Card

DEVICE = Card(
    name="native",
    slot="device",
    summary="Any device type that torch itself runs, the CPU included.",
    api_version=API_VERSION,
    priority=0,
    offers={
        "bf16",
        "fp16",
        "fp8",
        "float64",
        "memory_stats",
        "rng",
        "process_per_device",
        "collectives.torch",
    },
    implementation="accel_core.defaults.device:NativeDevice",
)
SINGLE = Card(
    name="single",
    slot="strategy",
    summary="One process, the model as it is.",
    api_version=API_VERSION,
    distributed_type="NO",
    offers={
        *("no_sync", "local_sgd", "join", "several_optimizers", "whole_weights", "local_gradients"),
        *("freezing", "unfreezing", "replacing", "regrouping", "closures", "partial_clips"),
    },
    implementation="accel_core.defaults.base:Single",
)
FP32 = Card(
    name="fp32",
    slot="precision",
    summary="Parameters and arithmetic as the user made them (mixed_precision: 'no').",
    api_version=API_VERSION,
    implementation="accel_core.defaults.precision:Unchanged",
)
FP16 = Card(
    name="fp16",
    slot="precision",
    summary="Autocast to float16 with a loss scaler.",
    api_version=API_VERSION,
    needs={"fp16"},
    implementation="accel_core.defaults.precision:Float16",
)
BF16 = Card(
    name="bf16",
    slot="precision",
    summary="Autocast to bfloat16.",
    api_version=API_VERSION,
    needs={"bf16"},
    implementation="accel_core.defaults.precision:BFloat16",
)
TORCHRUN = Card(
    name="torchrun",
    slot="launcher",
    summary="Workers on this node under torch's elastic agent.",
    api_version=API_VERSION,
    priority=0,
    offers={"named_rendezvous", "worker_output"},
    implementation="accel_core.launch.launcher:TorchrunLauncher",
)
JSONL = Card(
    name="jsonl",
    slot="tracker",
    summary="A file of JSON lines in the project's folder.",
    api_version=API_VERSION,
    implementation="accel_core.defaults.tracker:JsonLines",
)
