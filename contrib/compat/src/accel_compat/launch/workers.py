"""The `accel launch` command and the workers' variables for a request."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_compat.activation import VARIABLE, explain_inactive
from accel_compat.launch.cloud import credentials, is_cloud
from accel_compat.launch.convert import lay_out
from accel_compat.launch.request import Request
from accel_compat.notices import warn_once
from accel_compat.settings import FP8_PRODUCTS, defaults, find_setting
from accel_core import ConfigError

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
_READ_BY_WORKERS = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
_NEEDS = {
    "fsdp_": "use_fsdp",
    "fp8_": "fp8",
    "megatron_lm_": "use_megatron_lm",
    "parallelism_config_": "use_parallelism_config",
}
"""Start of settings -> the setting without which they are nothing."""


def launch(request: Request) -> int:
    """Start a request with our `accelerate` for the workers; return the exit code."""
    if request.settings.get("no_python"):
        raise ConfigError(
            "no_python: workers are Python programs here\nname a script, or a module by --module"
        )
    if (reason := explain_inactive()) is not None:
        raise ConfigError(f"workers would not import accel-compat's accelerate\n{reason}")
    for name, why in request.dropped.items():
        warn_once(f"{name} has no meaning here: {why}")
    if is_cloud(request.settings):
        told = {**environment(request.settings), **credentials(request.settings)}
        variables = {**os.environ, **told, VARIABLE: "1"}
        return _run(command(request), variables)
    told = environment(request.settings)
    _tell_replaced(told, request.settings)
    variables = {**os.environ, **told, VARIABLE: "1"}
    if request.settings.get("use_deepspeed"):  # DeepSpeed's launcher adds the working folder
        paths = [variables.get("PYTHONPATH"), str(Path.cwd())]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return _run(command(request), variables)


def _run(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command and return its exit code.

    SIGTERM goes to the command, which ends its workers.
    """
    with subprocess.Popen(words, env=variables) as started:  # noqa: S603  the user's script
        in_main = threading.current_thread() is threading.main_thread()
        before = in_main and signal.signal(signal.SIGTERM, lambda number, _: started.send_signal(number))
        try:
            return started.wait()
        except BaseException:
            started.kill()
            raise
        finally:
            if in_main:
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _tell_replaced(told: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Warn of this shell's variables that defaults of the launcher replace."""
    asked = {setting.variable for setting in map(find_setting, given) if setting is not None}
    asked |= {"ACCELERATE_USE_CPU"} if given.get("cpu") else set()
    for name in told.keys() - asked:
        before = os.environ.get(name, told[name])
        if name.startswith(_READ_BY_WORKERS) and before.lower() != told[name].lower():
            warn_once(
                f"the variable {name}={before} gives way to {told[name]}, as in Accelerate:"
                " `launch` takes its flag, or the config file's key"
            )


def accel() -> str:
    """Return the program `accel` of this environment."""
    return str(Path(sysconfig.get_path("scripts"), "accel"))


def command(request: Request) -> list[str]:
    """Return the command line of `accel launch`, or of `accel submit`."""
    verb, options = "submit" if is_cloud(request.settings) else "launch", lay_out(request.settings)
    flags = [f"--{path.removeprefix('launch.').replace('_', '-')}={options[path]}" for path in options]
    return [accel(), verb, *flags, *(["-m"] if request.module else []), *request.target]


def environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that Accelerate's launcher sets.

    Config classes and programs read them.
    """
    variables: dict[str, str] = {}
    # Accelerate's launcher tells workers these defaults though nobody asked for them.
    told = _in_use({**defaults("dynamo_", "fsdp_", "fp8_"), **settings}, settings)
    for name, value in told.items():
        setting = find_setting(name)
        if setting is None or not setting.variable:
            continue
        of_dynamo = setting.section == "compile"
        if setting.kind == "switch" and not of_dynamo:
            variables |= {setting.variable: "true"} if value else {}
        else:
            plain = isinstance(value, bool) and not of_dynamo
            variables[setting.variable] = str(value).lower() if plain else str(value)
    three = variables.pop("ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION", "").strip("([])").split(",")
    if len(three) == len(FP8_PRODUCTS):
        variables |= {name: part.strip() for name, part in zip(FP8_PRODUCTS, three, strict=True)}
    variables["ACCELERATE_MIXED_PRECISION"] = str(settings.get("mixed_precision", "no")).lower()
    variables["ACCELERATE_DYNAMO_BACKEND"] = str(settings.get("dynamo_backend", "no")).upper()
    variables["ACCELERATE_USE_CPU"] = str(bool(settings.get("cpu")))
    if settings.get("cpu"):
        variables |= {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    if settings.get("enable_cpu_affinity"):
        variables["ACCELERATE_CPU_AFFINITY"] = "1"
    devices = settings.get("gpu_ids", "all")
    if devices != "all":
        variables |= dict.fromkeys(_VISIBLE, str(devices))  # each kind of device reads its own
    return variables


def _in_use(told: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the settings of what is not used, as Accelerate does; name the given."""
    used = {**given, "fp8": str(given.get("mixed_precision")).lower() == "fp8"}
    left = dict(told)
    for name in told:
        setting = find_setting(name)
        needed = next((need for start, need in _NEEDS.items() if name.startswith(start)), None)
        if setting is not None and setting.section == "deepspeed":
            needed = "use_deepspeed"
        if needed is not None and not used.get(needed):
            del left[name]
            if setting is not None and given.get(name, setting.default) != setting.default:
                flag = "--mixed_precision fp8" if needed == "fp8" else f"--{needed}"
                warn_once(f"{name} has no effect without {flag}, as in Accelerate")
    return left
