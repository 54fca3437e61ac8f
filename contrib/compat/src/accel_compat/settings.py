"""What `accelerate launch` knows: its flags and its YAML file, as one flat table of settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from accel_compat.flags import DEEPSPEED, LAUNCHING, SWITCHES, given, launch_parser
from accel_core import ConfigError

__all__ = ["DROPPED", "Asked", "asked_by", "parse", "parser", "read_file"]

PREFIXES: Final[Mapping[str, str]] = {
    "fsdp_": "FSDP_",
    "dynamo_": "ACCELERATE_DYNAMO_",
    "megatron_lm_": "MEGATRON_LM_",
    "parallelism_config_": "PARALLELISM_CONFIG_",
}
"""Start of a setting -> start of the variable that its plugin reads."""

_OURS: Final = "the launcher of accel-core starts the workers itself"
_TPU: Final = "accel-xla starts on a TPU host by `accel launch --device xla`; a pod's hosts each call it"
_CLOUD: Final = "jobs are not sent to a cloud; call the launcher inside the job"
_MPI: Final = "start the script by mpirun itself: its variables are understood"
_FP8: Final = "fp8 comes in a later package"
_WITHOUT: Final[Mapping[str, str]] = {
    _OURS: "same_network role rdzv_backend rdzv_conf monitor_interval deepspeed_hostfile"
    " deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher",
    _TPU: "tpu tpu_use_cluster tpu_use_sudo tpu_env tpu_name tpu_zone tpu_vm vm env commands command_file",
    _CLOUD: "compute_environment aws_access_key_id aws_secret_access_key ec2_instance_type iam_role_name"
    " image_uri profile region base_job_name pytorch_version py_version transformers_version"
    " sagemaker_inputs_file sagemaker_metrics_file additional_args",
    _MPI: "mpirun_hostfile mpirun_ccl",
    _FP8: "fp8_backend fp8_margin fp8_interval fp8_format fp8_fp8_format fp8_amax_history_len"
    " fp8_amax_compute_algo fp8_override_linear_precision fp8_opt_level fp8_enable_fsdp_float8_all_gather"
    " fp8_pad_inner_dim fp8_use_autocast_during_eval",
    "the visible devices are used": "multi_gpu",
    "the output of all workers is shown": "tee",
    "redirect the output of `accel launch`": "log_dir",
    "a script is run, not imported": "main_training_function",
    "choose mixed_precision": "downcast_bf16",
    "one traceback is shown in any case": "quiet",
}
DROPPED: Final[Mapping[str, str]] = {name: why for why, names in _WITHOUT.items() for name in names.split()}
"""Setting that nothing here needs -> why."""
SECTIONS: Final = ("fsdp_config", "deepspeed_config", "megatron_lm_config", "dynamo_config", "mpirun_config")
WITH_PREFIX: Final[Mapping[str, str]] = {"parallelism_config": "parallelism_config_", "fp8_config": "fp8_"}
STRATEGIES: Final[Mapping[str, str]] = {
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
    "TPU": "tpu",
    "XLA": "tpu",
}
_DEVICES: Final = ("CPU", "GPU", "NPU", "XPU", "HPU", "MLU", "MUSA", "SDAA", "NEURON")
NO_STRATEGY: Final = ("NO", *(f"MULTI_{device}" for device in _DEVICES))


@frozen
class Asked:
    """settings: flags over file. target: the script, or with `module` a module, and its arguments."""

    settings: Mapping[str, Any]
    target: Sequence[str]
    module: bool
    file: str | None
    dropped: Mapping[str, str]
    """Setting that was given and has no meaning here -> why."""


def parser() -> argparse.ArgumentParser:
    """The flags of `accelerate launch`."""
    return launch_parser(DROPPED)


def parse(words: Sequence[str], default_file: Path | None) -> Asked:
    """Read `accelerate launch`'s command line and the YAML file it names, else the default one if there is.

    Raises:
        ConfigError: the file is missing, or has unknown keys.
        SystemExit: argparse's, for unknown flags.
    """
    return asked_by(parser().parse_args(words), default_file)


def asked_by(read: argparse.Namespace, default_file: Path | None) -> Asked:
    """What a parsed command line asks for."""
    flags = given(read)
    file = flags.pop("config_file", None)
    target = [flags.pop("training_script"), *flags.pop("training_script_args", ())]
    module = bool(flags.pop("module", False))
    if file is None and default_file is not None and default_file.is_file():
        file = str(default_file)
    settings = {**(read_file(file) if file else {}), **flags}
    dropped = {name: DROPPED[name] for name in settings if name in DROPPED}
    kept = {name: value for name, value in settings.items() if name not in DROPPED}
    return Asked(kept, target, module, file, dropped)


def read_file(file: str) -> dict[str, Any]:
    """The settings of a YAML or JSON file that `accelerate config` wrote, of any version.

    Raises:
        ConfigError: it is missing, no mapping, or has keys that no version had.
    """
    import yaml

    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no config file {file}\nname one that `accelerate config` wrote")
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ConfigError(
            f"{file}: expected keys and values, found {type(found).__name__}\nname another file"
        )
    settings = dict(_flat(found))
    unknown = sorted(name for name in settings if not _known(name))
    if unknown:
        raise ConfigError(
            f"{file}: no version of Accelerate has {', '.join(unknown)}\ncorrect the names, or take them out"
        )
    return _meant(settings)


def _flat(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in found.items():
        if value is None:
            continue
        if isinstance(value, dict) and (key in SECTIONS or key in WITH_PREFIX):
            prefix = WITH_PREFIX.get(key, "")
            for name, inner in value.items():
                if inner is not None:
                    yield (name if name.startswith(prefix) else f"{prefix}{name}"), inner
        elif key == "mpirun_config" or (value in ({}, []) and not isinstance(value, bool)):
            continue
        else:
            yield key, value


def _known(name: str) -> bool:
    always = ("distributed_type", "use_cpu", "config_file", *SWITCHES, *LAUNCHING, *DEEPSPEED, *DROPPED)
    return name in always or any(name.startswith(prefix) for prefix in PREFIXES)


def _meant(settings: dict[str, Any]) -> dict[str, Any]:
    """`distributed_type` and `use_cpu` as the flags that say the same."""
    kind = str(settings.pop("distributed_type", "NO")).upper()
    if kind in ("FALSE", "NONE"):  # what YAML makes of a bare NO
        kind = "NO"
    if kind in STRATEGIES:
        settings[STRATEGIES[kind]] = True
    elif kind not in NO_STRATEGY:
        known = ", ".join((*NO_STRATEGY, *STRATEGIES))
        raise ConfigError(f"distributed_type {kind} is none of {known}\nchoose one of these")
    if settings.pop("use_cpu", False):
        settings["cpu"] = True
    bare = [name for name in ("mixed_precision", "dynamo_backend") if settings.get(name) is False]
    return {**settings, **dict.fromkeys(bare, "no")}
