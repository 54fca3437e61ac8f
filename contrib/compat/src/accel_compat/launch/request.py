"""A request to `accelerate launch`: its flags over its config file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from accel_compat.configs.enums import DistributedType
from accel_compat.environment.constants import FSDP_SHARDING_STRATEGY
from accel_compat.launch.cloud import is_cloud, kind_of
from accel_compat.launch.config_file import ClusterConfig
from accel_compat.launch.file_mistakes import parse_file, refuse_mistakes, unmet
from accel_compat.launch.parser import given_flags, launch_parser
from accel_compat.settings import SECTIONS, STRATEGIES, find_setting, ignored_settings
from accel_core import ConfigError

DISTRIBUTED_TYPES: Final[Mapping[str, str]] = {
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
    "TPU": "tpu",
    "XLA": "tpu",
}
_ONE_OF: Final = ("multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp")
_WRITTEN_UNASKED: Final[Mapping[str, Any]] = {"same_network": True, "downcast_bf16": "no"}
NO_STRATEGY: Final = ("NO", *(kind.value for kind in DistributedType if kind.value.startswith("MULTI_")))


@frozen
class Request:
    """Settings of a launch, and its script or module with arguments."""

    settings: Mapping[str, Any]
    target: Sequence[str]
    module: bool
    file: str | None
    dropped: Mapping[str, str]
    """Setting that was given and has no meaning here -> why."""


def parse(words: Sequence[str], default_file: Path | None) -> Request:
    """Read the command line, and the file that it names or else the default file.

    The default file may be missing.

    Raises:
        ConfigError: the file is missing, or has unknown keys.
        SystemExit: argparse's, for unknown flags.
    """
    arguments = launch_parser().parse_args(words)
    try:
        refuse_contradictions(arguments)
    except ValueError as error:
        raise ConfigError(f"{error}\ncorrect the flags; `accelerate launch --help` lists them") from error
    return read_arguments(arguments, default_file)


def refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Raise ValueError for flags that Accelerate refuses together."""
    if sum(bool(getattr(arguments, name, False)) for name in _ONE_OF) > 1:
        raise ValueError(
            "You can only use one of `--cpu`, `--multi_gpu`, `--tpu`, `--use_deepspeed`, `--use_fsdp` at a"
            " time."
        )
    if arguments.multi_gpu and arguments.num_processes is not None and arguments.num_processes < 2:
        raise ValueError("You need to use at least 2 processes to use `--multi_gpu`.")
    meshed = arguments.use_fsdp and int(arguments.fsdp_version) == 2
    if arguments.use_parallelism_config and not meshed:
        raise ValueError(
            "You cannot use `--use_parallelism_config` without `--use_fsdp` and `--fsdp_version=2`. "
        )


def read_arguments(arguments: argparse.Namespace, default_file: Path | None) -> Request:
    """Read a parsed command line and its config file."""
    flags = given_flags(arguments)
    file = flags.pop("config_file", None)
    target = [flags.pop("training_script"), *flags.pop("training_script_args", ())]
    module = bool(flags.pop("module", False))
    if file is None and default_file is not None and default_file.is_file():
        file = str(default_file)
    _refuse_wrong_values(flags)
    settings = _with_sharding(_merged(read_file(file) if file else {}, flags))
    ignored = ignored_settings()
    named = {name: value for name, value in settings.items() if value not in _unasked(name)}
    dropped = {name: ignored[name] for name in named if name in ignored}
    kept = {name: value for name, value in settings.items() if name not in ignored}
    return Request(kept, target, module, file, dropped)


def _unasked(name: str) -> tuple[Any, ...]:
    """Return the values of a file that nobody chose.

    These are the default, and what Accelerate's `config` writes.
    """
    return getattr(ClusterConfig, name, None), _WRITTEN_UNASKED.get(name)


def _refuse_wrong_values(flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        setting = find_setting(name)
        if setting is not None and (wanted := unmet(setting, value)):
            raise ConfigError(f"--{name} is {value!r}, not {wanted}\ncorrect it, or leave it out")


def _merged(settings: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags over a file's settings.

    A flag that chooses how to train replaces the file's strategy.

    Raises:
        ConfigError: several strategies are chosen.
    """
    chosen = [name for name in (*STRATEGIES, "multi_gpu", "tpu") if flags.get(name)]
    replaced = [*STRATEGIES, "use_parallelism_config"] if chosen else []
    if chosen == ["use_fsdp"]:
        replaced = [*STRATEGIES]  # whose layout the file may say
    merged = {name: value for name, value in settings.items() if name not in replaced} | dict(flags)
    chosen = [f"--{name}" for name in STRATEGIES if merged.get(name)]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)}: models are trained by one of them\nchoose one of these")
    return merged


def read_file(file: str) -> dict[str, Any]:
    """Read the settings of a YAML or JSON file by any version of `accelerate config`.

    Raises:
        ConfigError: the file is missing, is not a mapping, or has unknown keys or wrong values.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no config file {file}\nname one that `accelerate config` wrote")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}\nname another file") from error
    content, lines = parse_file(file, text)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file}: expected keys and values, found {type(content).__name__}\nname another file"
        )
    if content.pop("fp16", False):  # of the first releases
        content.setdefault("mixed_precision", "fp16")
    found = {place: (name, value) for place, name, value in _flat(content)}
    refuse_mistakes(file, lines, found)
    return _with_sharding(_as_flags(dict(found.values())))


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the place in the file, the setting and its value."""
    for key, value in content.items():
        if value is None:
            continue
        if isinstance(value, dict) and key in SECTIONS:
            prefix = SECTIONS[key]
            for name, inner in value.items():
                if inner is not None:
                    yield f"{key}.{name}", (name if name.startswith(prefix) else f"{prefix}{name}"), inner
        elif value not in ({}, []) or (find_setting(key) is None and key not in SECTIONS):
            yield key, key, value


def _as_flags(settings: dict[str, Any]) -> dict[str, Any]:
    """Turn `distributed_type` and `use_cpu` into the flags that say the same."""
    kind = str(settings.pop("distributed_type", "NO")).upper()
    if kind in ("FALSE", "NONE"):  # what YAML makes of a bare NO
        kind = "NO"
    if is_cloud(settings):
        settings["distributed_type"] = kind_of(kind)
    elif kind in DISTRIBUTED_TYPES:
        settings[DISTRIBUTED_TYPES[kind]] = True
    elif kind not in NO_STRATEGY:
        types = ", ".join((*NO_STRATEGY, *DISTRIBUTED_TYPES))
        raise ConfigError(f"distributed_type {kind} is not one of {types}\nchoose one of these")
    if settings.pop("use_cpu", False):
        settings["cpu"] = True
    if any(name.startswith(SECTIONS["parallelism_config"]) for name in settings):
        settings["use_parallelism_config"] = True  # a file has no switch for it
    bare = [name for name in ("mixed_precision", "dynamo_backend") if settings.get(name) is False]
    return {**settings, **dict.fromkeys(bare, "no")}


def _with_sharding(settings: dict[str, Any]) -> dict[str, Any]:
    """Take FSDP 1's strategy from the key in which `accelerate config` writes it."""
    word = str(settings.get("fsdp_reshard_after_forward")).upper()
    if word in FSDP_SHARDING_STRATEGY and str(settings.get("fsdp_version", 1)) == "1":
        del settings["fsdp_reshard_after_forward"]
        settings.setdefault("fsdp_sharding_strategy", word)
    return settings
