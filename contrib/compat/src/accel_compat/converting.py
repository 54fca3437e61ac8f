"""A config file of Accelerate, as accel-core's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from accel_compat.fields import MEGATRONS, is_off
from accel_compat.settings import DROPPED
from accel_core import ConfigError, plugin_status

__all__ = ["Converted", "convert"]

_MEGATRON: Final = "megatron_lm_"
_LISTS: Final = ("fsdp_transformer_layer_cls_to_wrap",)

PATHS: Final[Mapping[str, str]] = {
    "mixed_precision": "mixed_precision",
    "machine_rank": "launch.node_rank",
    "num_machines": "launch.nodes",
    "max_restarts": "launch.max_restarts",
    "dynamo_backend": "compile.backend",
    "enable_cpu_affinity": "cuda.numa_affinity",
    "dynamo_mode": "compile.mode",
    "dynamo_use_fullgraph": "compile.fullgraph",
    "dynamo_use_dynamic": "compile.dynamic",
    "dynamo_use_regional_compilation": "compile.use_regional_compilation",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp.transformer_cls_names_to_wrap",
    "fsdp_offload_params": "fsdp.cpu_offload",
    "fsdp_version": "fsdp.fsdp_version",
    "deepspeed_config_file": "deepspeed.hf_ds_config",
    "zero_stage": "deepspeed.zero_stage",
    "offload_optimizer_device": "deepspeed.offload_optimizer_device",
    "offload_param_device": "deepspeed.offload_param_device",
    "offload_optimizer_nvme_path": "deepspeed.offload_optimizer_nvme_path",
    "offload_param_nvme_path": "deepspeed.offload_param_nvme_path",
    "gradient_accumulation_steps": "deepspeed.gradient_accumulation_steps",
    "gradient_clipping": "deepspeed.gradient_clipping",
    "zero3_init_flag": "deepspeed.zero3_init_flag",
    "zero3_save_16bit_model": "deepspeed.zero3_save_16bit_model",
    "deepspeed_moe_layer_cls_names": "deepspeed.transformer_moe_cls_names",
}
STRATEGIES: Final[Mapping[str, str]] = {
    "use_fsdp": "fsdp",
    "use_deepspeed": "deepspeed",
    "use_megatron_lm": "megatron",
}
ELSEWHERE: Final[Mapping[str, str]] = {
    "gpu_ids": "set the device's own variable, such as CUDA_VISIBLE_DEVICES",
    "num_cpu_threads_per_process": "set OMP_NUM_THREADS",
    "debug": "set ACCEL_DEBUG=1",
}


@frozen
class Converted:
    """config: nested, as YAML. dropped: setting -> why it has no place in it."""

    config: Mapping[str, Any]
    dropped: Mapping[str, str]


def convert(settings: Mapping[str, Any]) -> Converted:
    """Each setting at its path, or among the dropped."""
    dropped = {name: why for name, why in {**DROPPED, **ELSEWHERE}.items() if name in settings}
    if settings.get("mixed_precision") == "fp8":
        dropped["mixed_precision"] = "fp8 comes in a later package; choose bf16 or fp16"
    bound = settings.get("enable_cpu_affinity")
    if "enable_cpu_affinity" in settings and (not bound or plugin_status("cuda") == "missing"):
        dropped["enable_cpu_affinity"] = (
            "it is accel-cuda's: cuda: {numa_affinity: true}" if bound else "it is off"
        )
    found: dict[str, Any] = {}
    for name, value in settings.items():
        path = _path(name)
        off = name.startswith(_MEGATRON) and is_off(name.removeprefix(_MEGATRON), _value(name, value))
        if name not in dropped and path is not None and not (off and ".other" in path):
            found[path] = _value(name, value)
    strategy = next((STRATEGIES[name] for name in STRATEGIES if settings.get(name)), None)
    found |= _world(settings)
    if strategy is not None:
        found = {"strategy": strategy, **found}
    if strategy == "fsdp":
        found.setdefault("fsdp.fsdp_version", 1)
    others = {_section(path) for path in found} & set(STRATEGIES.values()) - {strategy}
    why = f"distributed_type chooses {strategy or 'no such strategy'}"
    dropped |= {name: why for name in settings if _section(_path(name) or "") in others}
    kept = {path: value for path, value in found.items() if _section(path) not in others}
    return Converted(_nested(kept), dropped)


def _section(path: str) -> str:
    return path.partition(".")[0]


def _path(name: str) -> str | None:
    if name in PATHS:
        return PATHS[name]
    if (megatrons := MEGATRONS.get(name.removeprefix(_MEGATRON))) and name.startswith(_MEGATRON):
        return f"megatron.other_megatron_args.{megatrons}"
    for start, section in (("fsdp_", "fsdp"), (_MEGATRON, "megatron"), ("parallelism_config_", "fsdp")):
        if name.startswith(start):
            return f"{section}.{name[len(start) :]}"
    return None


def _value(name: str, value: Any) -> Any:
    if name in _LISTS and isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    if name == "dynamo_backend":
        return str(value).lower()
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def _world(settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if settings.get("cpu"):
        found["device"] = "cpu"
    if "num_processes" in settings:
        nodes = _count(settings, "num_machines") if "num_machines" in settings else 1
        found["launch.processes_per_node"] = _count(settings, "num_processes") // nodes
    if "main_process_ip" in settings:
        port = settings.get("main_process_port", 29500)
        found["launch.rendezvous"] = f"{settings['main_process_ip']}:{port}"
    return found


def _count(settings: Mapping[str, Any], name: str) -> int:
    value = settings[name]
    if not str(value).isdecimal() or int(value) < 1:
        raise ConfigError(f"{name} is {value!r}, not a number of 1 or more\ngive a number in the file")
    return int(value)


def _nested(found: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for path, value in found.items():
        *parents, last = path.split(".")
        inner = whole
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return whole
