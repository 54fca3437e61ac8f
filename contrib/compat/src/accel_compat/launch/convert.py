"""A config file of Accelerate, as accel-core's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from accel_compat.launch.cloud import is_cloud, options
from accel_compat.settings import STRATEGIES, Setting, find_setting, ignored_settings
from accel_core import ConfigError, plugin_status

ELSEWHERE: Final[Mapping[str, str]] = {
    "gpu_ids": "set the device's own variable, such as CUDA_VISIBLE_DEVICES",
    "num_cpu_threads_per_process": "set OMP_NUM_THREADS",
    "debug": "set ACCEL_DEBUG=1",
    "aws_access_key_id": "set AWS_ACCESS_KEY_ID, or sagemaker.profile",
    "aws_secret_access_key": "set AWS_SECRET_ACCESS_KEY, or sagemaker.profile",
}
RECIPES: Final = "the program gives TransformerEngineConfig or Float8Config"
FP8: Final = (
    "fp8 needs accel-torchao or accel-transformer-engine, of which none can be used here; choose bf16 or fp16"
)


@frozen
class Converted:
    """config: nested, as YAML. dropped: setting -> why it has no place in it."""

    config: Mapping[str, Any]
    dropped: Mapping[str, str]


def serves_fp8() -> bool:
    """Tell whether a plugin for fp8 can be used here."""
    return any(plugin_status(name) == "available" for name in ("fp8-torchao", "fp8-te"))


def convert(settings: Mapping[str, Any]) -> Converted:
    """Put each setting at its path, or among the dropped."""
    dropped = {name: why for name, why in {**ignored_settings(), **ELSEWHERE}.items() if name in settings}
    dropped |= {name: RECIPES for name in settings if name.startswith("fp8_")}
    if settings.get("mixed_precision") == "fp8" and not serves_fp8():
        dropped["mixed_precision"] = FP8
    bound = settings.get("enable_cpu_affinity")
    if "enable_cpu_affinity" in settings and (not bound or plugin_status("cuda") == "missing"):
        dropped["enable_cpu_affinity"] = (
            "it is accel-cuda's: cuda: {numa_affinity: true}" if bound else "it is off"
        )
    strategy = next((STRATEGIES[name] for name in STRATEGIES if settings.get(name)), None)
    others = set(STRATEGIES.values()) - {strategy}
    why = f"distributed_type chooses {strategy or 'no such strategy'}"
    config: dict[str, Any] = {} if strategy is None else {"strategy": strategy}
    for name, given in settings.items():
        setting = find_setting(name)
        if setting is None or not setting.path or name in dropped or setting.section == "sagemaker":
            continue
        value = _value(setting, given)
        if setting.is_off(value):
            continue
        if setting.owner in others:
            dropped[name] = why
        else:
            config[setting.path] = value
    _keep_sizes(config)
    config |= lay_out(settings)
    if strategy == "fsdp":
        config.setdefault("fsdp.fsdp_version", 1)
    return Converted(_nested(config), dropped)


def _keep_sizes(config: dict[str, Any]) -> None:
    """Leave out the sizes of 1 that say nothing: a file may name a dimension only if a package has it."""
    sizes = {path: size for path, size in config.items() if path.startswith("parallelism.")}
    meshed = any(size != 1 for size in sizes.values())
    for path, size in sizes.items():
        # Unset, dp_shard is all ranks that the others leave.
        if size == 1 and not (
            meshed and config.get("strategy") == "fsdp" and path.startswith("parallelism.dp_")
        ):
            del config[path]
    if config.get("parallelism.cp", 1) == 1:
        config.pop("cp.rotate_method", None)


def _value(setting: Setting, value: Any) -> Any:
    if setting.kind == "list" and isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    if setting.name == "dynamo_backend":
        return str(value).lower()
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def lay_out(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the path and value of each option that says which processes run where.

    Raises:
        ConfigError: the machines cannot share the processes out.
    """
    config: dict[str, Any] = {"device": "cpu"} if settings.get("cpu") else {}
    if is_cloud(settings):
        return config | options(settings)
    nodes = _count(settings, "num_machines") if "num_machines" in settings else 1
    if "num_processes" in settings:
        count = _count(settings, "num_processes")
        if count % nodes:
            raise ConfigError(
                f"num_processes {count} is not a multiple of num_machines {nodes}\n"
                "give in num_processes the number of processes of all machines together"
            )
        config["launch.processes_per_node"] = count // nodes
    if nodes > 1:
        config["launch.nodes"] = nodes
    host, port = settings.get("main_process_ip"), settings.get("main_process_port")
    if "mpirun_hostfile" in settings:  # mpirun starts the ranks of all machines, and numbers them
        config |= {"launch.launcher": "mpi", "mpi.hostfile": settings["mpirun_hostfile"]}
        port = None if host is None else port
    elif nodes > 1:
        config["launch.node_rank"] = settings.get("machine_rank", 0)
    if "mpirun_ccl" in settings:  # a word in Accelerate's own files
        config["mpi.ccl_workers"] = _count(settings, "mpirun_ccl")
    if host is not None or port not in (None, 0):  # 0: any free one, as without a word
        config["launch.rendezvous"] = f"{host or '127.0.0.1'}:{port or 29500}"
    if int(settings.get("max_restarts", 0)):
        config["launch.max_restarts"] = settings["max_restarts"]
    return config


def _count(settings: Mapping[str, Any], name: str) -> int:
    value = settings[name]
    if not str(value).isdecimal() or int(value) < 1:
        raise ConfigError(f"{name} is {value!r}, not a number of 1 or more\ngive a number in the file")
    return int(value)


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for path, value in config.items():
        *parents, last = path.split(".")
        inner = whole
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return whole
