"""`accelerate launch`'s settings, as an `accel launch` command and the variables its workers read."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_compat.flags import DEEPSPEED
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
    """The variables that the plugins of the surface read."""
    found = {variable: "true" for name, variable in _STRATEGIES.items() if settings.get(name)}
    for name, value in settings.items():
        variable = _NAMES.get(name) or DEEPSPEED.get(name) or _prefixed(name)
        if variable is not None:
            found[variable] = str(value).lower() if isinstance(value, bool) else str(value)
    if "mixed_precision" in settings:
        found["ACCELERATE_MIXED_PRECISION"] = str(settings["mixed_precision"])
    if settings.get("cpu"):
        found["ACCELERATE_USE_CPU"] = "true"
    if settings.get("debug"):
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if "num_cpu_threads_per_process" in settings:
        found["OMP_NUM_THREADS"] = str(settings["num_cpu_threads_per_process"])
    devices = settings.get("gpu_ids", "all")
    if devices != "all":
        found |= dict.fromkeys(_VISIBLE, str(devices))  # each kind of device reads its own
    return found


def _prefixed(name: str) -> str | None:
    start = next((start for start in PREFIXES if name.startswith(start)), None)
    return None if start is None else PREFIXES[start] + name[len(start) :].upper()
