"""Mistakes in a config file of Accelerate, each with its line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from accel_compat.configs.deepspeed import PATHS
from accel_compat.environment.constants import FSDP_SHARDING_STRATEGY
from accel_compat.environment.variables import str_to_bool
from accel_compat.settings import SECTIONS, WORDS, Setting, settings
from accel_core import ConfigError


def parse_file(file: str, text: str) -> tuple[Any, Mapping[str, int]]:
    """Return what a file of YAML or JSON holds, and the line of each key.

    Keys of sections are written with dots.

    Raises:
        ConfigError: it is neither, or a mapping has a key twice.
    """
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = file if mark is None else f"{file}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{where}: this is not YAML: {problem}\ncorrect the line") from error
    lines: dict[str, int] = {}
    for path, line in _keys(node):
        if path in lines:
            raise ConfigError(
                f"{file}:{line}: {path} is given on line {lines[path]} already\nkeep one of them"
            )
        lines[path] = line
    return content, lines


def _keys(node: Any, above: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{above}{key.value}"
            yield path, key.start_mark.line + 1
            yield from _keys(value, f"{path}.")


def refuse_mistakes(file: str, lines: Mapping[str, int], found: Mapping[str, tuple[str, Any]]) -> None:
    """Raise one ConfigError for all unknown keys and wrong values of a file.

    found: path in the file -> the setting's name, and its value.
    """
    known = {**settings(), **{name: settings()["debug"] for name in ("use_cpu", "distributed_type")}}
    wrong = []
    for path, (name, value) in found.items():
        where = f"{file}:{lines[path]}" if path in lines else file
        if path in SECTIONS:
            wrong.append(f"{where}: {path} is {value!r}, not a section of keys and values")
        elif name not in known or name == "module":
            section = path.rpartition(".")[0]
            names = [each for each in known if not section or each.startswith(name.partition("_")[0])]
            near = difflib.get_close_matches(name, [*(names or known), *(() if section else SECTIONS)], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            wrong.append(f"{where}: Accelerate 1.15 has no key {path}{hint}")
        elif name != "distributed_type" and (wanted := unmet(known[name], value)):
            wrong.append(f"{where}: {path} is {value!r}, not {wanted}")
        elif name in PATHS and "deepspeed_config.deepspeed_config_file" in found:
            wrong.append(f"{where}: {path} is given beside deepspeed_config_file; give it in that file only")
    if wrong:
        raise ConfigError("\n".join([*wrong, "correct these lines, or take them out"]))


def unmet(setting: Setting, value: Any) -> str:
    """Return what the value should have been, or nothing."""
    text = str(value).upper()
    if words := WORDS.get(setting.name):
        return "" if value is False or text in map(str.upper, words) else f"one of {', '.join(words)}"
    if text == "AUTO" and setting.unset == "auto":
        return ""
    if setting.name == "fsdp_reshard_after_forward" and text in FSDP_SHARDING_STRATEGY:
        return ""  # what `accelerate config` writes for version 1
    whole: Callable[[str], Any] | None = {"int": int, "float": float}.get(setting.kind)
    if setting.name in ("num_processes", "num_machines"):
        whole = _positive
    wanted = "a number of 1 or more" if whole is _positive else f"a number ({setting.kind})"
    if whole is None and (setting.kind == "switch" or setting.default in ("true", "false")):
        whole, wanted = str_to_bool, "true or false"
    try:
        if whole is not None:
            whole(str(value))
    except ValueError:
        return wanted
    return ""


def _positive(text: str) -> int:
    if int(text) < 1 and int(text) != -1:  # which asks for it on the command line
        raise ValueError(text)
    return int(text)
