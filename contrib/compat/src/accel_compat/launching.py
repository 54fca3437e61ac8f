"""`accelerate launch`'s settings, as an `accel launch` command and the variables its workers read."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_compat.flags import DEEPSPEED, DEFAULTS
from accel_compat.saying import say_once
from accel_compat.settings import PREFIXES, Asked
from accel_compat.shim import write_shim
from accel_core import ConfigError

__all__ = ["accel", "command", "environment", "launch"]

_NAMES = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "HABANA_VISIBLE_MODULES",
    "MLU_VISIBLE_DEVICES",
    "MUSA_VISIBLE_DEVICES",
    "SDAA_VISIBLE_DEVICES",
    "NEURON_RT_VISIBLE_CORES",
)
_STRATEGIES = {
    "use_fsdp": "ACCELERATE_USE_FSDP",
    "use_deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "use_megatron_lm": "ACCELERATE_USE_MEGATRON_LM",
    "use_parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}


def launch(asked: Asked) -> int:
    """Start it with an `accelerate` that is ours, for the workers and their children; its exit code."""
    if asked.settings.get("no_python"):
        raise ConfigError(
            "no_python: workers are Python programs here\nname a script, or a module by --module"
        )
    for name, why in asked.dropped.items():
        say_once(f"{name} has no meaning here: {why}")
    with tempfile.TemporaryDirectory(prefix="accel-compat-") as folder:
        write_shim(Path(folder))
        known = {**os.environ, **environment(asked.settings)}
        known["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, known.get("PYTHONPATH")]))
        known["PATH"] = os.pathsep.join([str(Path(folder, "bin")), known.get("PATH", "")])
        done = subprocess.run(command(asked), env=known, check=False)  # noqa: S603  the user's script
        return done.returncode


def accel() -> str:
    """The program `accel` of this environment."""
    return str(Path(sysconfig.get_path("scripts"), "accel"))


def command(asked: Asked) -> list[str]:
    """The command line of `accel launch`."""
    words = [accel(), "launch", *_flags(asked.settings)]
    return [*words, *(["-m"] if asked.module else []), *asked.target]


def _flags(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings.get("cpu"):
        yield from ("--device", "cpu")
    nodes = int(settings.get("num_machines", 1))
    if "num_processes" in settings:
        count = int(settings["num_processes"])
        if count % nodes:
            raise ConfigError(
                f"num_processes {count} cannot be shared out to num_machines {nodes}\n"
                "let num_processes, which counts those of all machines, be a multiple of it"
            )
        yield from ("-n", str(count // nodes))
    if nodes > 1:
        yield from ("--nodes", str(nodes), "--node-rank", str(settings.get("machine_rank", 0)))
    host, port = settings.get("main_process_ip"), settings.get("main_process_port")
    if host is not None or port not in (None, 0):  # 0: any free one, as without a word
        yield from ("--rendezvous", f"{host or '127.0.0.1'}:{port or 29500}")
    if int(settings.get("max_restarts", 0)):
        yield from ("--max-restarts", str(settings["max_restarts"]))


def environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """The variables that Accelerate's launcher sets: plugins of the surface, and programs, read them."""
    found = {variable: "true" for name, variable in _STRATEGIES.items() if settings.get(name)}
    for name, value in {**_unasked(settings), **settings}.items():
        variable = _NAMES.get(name) or _deepspeeds(name, settings) or _prefixed(name)
        if variable is not None:
            plain = isinstance(value, bool) and not name.startswith("dynamo_")
            found[variable] = str(value).lower() if plain else str(value)
    found["ACCELERATE_MIXED_PRECISION"] = str(settings.get("mixed_precision", "no"))
    found["ACCELERATE_DYNAMO_BACKEND"] = str(settings.get("dynamo_backend", "no")).upper()
    found["ACCELERATE_USE_CPU"] = str(bool(settings.get("cpu")))
    if settings.get("enable_cpu_affinity"):
        found |= {"ACCELERATE_CPU_AFFINITY": "1", "ACCEL__CUDA__NUMA_AFFINITY": "true"}
    if settings.get("debug"):
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if "num_cpu_threads_per_process" in settings:
        found["OMP_NUM_THREADS"] = str(settings["num_cpu_threads_per_process"])
    devices = settings.get("gpu_ids", "all")
    if devices != "all":
        found |= dict.fromkeys(_VISIBLE, str(devices))  # each kind of device reads its own
    return found


def _unasked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What Accelerate's launcher tells workers though nobody asked for it."""
    starts = ("dynamo_", *(["fsdp_"] if settings.get("use_fsdp") else []))
    found = {name: value for name, value in DEFAULTS.items() if name.startswith(starts)}
    switches = ("use_fullgraph", "use_dynamic", "use_regional_compilation")
    return {**found, **dict.fromkeys((f"dynamo_{name}" for name in switches), "False")}


def _deepspeeds(name: str, settings: Mapping[str, Any]) -> str | None:
    """The variable of a setting that only DeepSpeed is told, as there."""
    variable = DEEPSPEED.get(name)
    if variable is not None and not settings.get("use_deepspeed"):
        say_once(f"{name} is DeepSpeed's, and nothing without --use_deepspeed, as in Accelerate")
        return None
    return variable


def _prefixed(name: str) -> str | None:
    start = next((start for start in PREFIXES if name.startswith(start)), None)
    return None if start is None else PREFIXES[start] + name[len(start) :].upper()
