"""The settings of `accelerate launch`: `settings.csv` as a table.

A row says the flag or key of a config file, its kind and default, the variable that workers read, the path
in accel-core's config, and why a setting has no meaning here. `unset` is what the config class of the worker
takes where neither an argument nor the variable gives a value.
"""

from __future__ import annotations

import csv
import os
from ast import literal_eval
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from accel_compat.environment.variables import str_to_bool

PREFIXES: Final = {
    "fsdp_": ("FSDP_", "fsdp"),
    "dynamo_": ("ACCELERATE_DYNAMO_", "compile"),
    "megatron_lm_": ("MEGATRON_LM_", "megatron"),
    "parallelism_config_": ("PARALLELISM_CONFIG_", "fsdp"),
}
"""Start of a setting -> (start of its variable, its section).

It serves settings of older releases too, which have no row in the table.
"""
MEGATRON: Final = "megatron_lm_"
STRATEGIES: Final = {"use_fsdp": "fsdp", "use_deepspeed": "deepspeed", "use_megatron_lm": "megatron"}
"""Switch -> the strategy that it chooses, whose section has the same name."""


@frozen
class Setting:
    """A row of the table."""

    name: str
    kind: str
    """switch, str, int, float or list (a str with commas)."""
    default: Any = None
    unset: Any = None
    variable: str = ""
    path: str = ""
    help: str = ""
    reason: str = ""
    """Why the setting has no meaning here."""

    @property
    def section(self) -> str:
        """The first part of the path."""
        return self.path.partition(".")[0]

    @property
    def native_name(self) -> str | None:
        """megatron-core's own name of an option that only goes through MegatronLMPlugin."""
        start, _, name = self.path.rpartition(".")
        return name if start == "megatron.other_megatron_args" else None

    def read_variable(self) -> Any:
        """Read the variable, as a value of the kind of `unset`."""
        text = os.environ.get(self.variable)
        if text is None or text == self.unset:
            return self.unset
        if isinstance(self.unset, bool) or self.kind == "switch":
            return str_to_bool(text) == 1
        kind = type(self.unset).__name__ if isinstance(self.unset, (int, float)) else self.kind
        return {"int": int, "float": float}.get(kind, str)(text)

    def is_off(self, value: Any) -> bool:
        """Tell whether the value is megatron-core's default, so that it is not passed on."""
        return value is False and self.native_name not in (None, "attention_softmax_in_fp32")


@cache
def settings() -> Mapping[str, Setting]:
    """All rows by name, in the order of the flags."""
    with Path(__file__).with_name("settings.csv").open(encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    read = (Setting(*row[:2], *(literal_eval(each or "None") for each in row[2:4]), *row[4:]) for row in rows)
    return {setting.name: setting for setting in read}


def fill_from_variables(config: Any, section: str, *names: str) -> None:
    """Fill the fields that are None from their variables."""
    rows = {setting.path: setting for setting in settings().values()}
    for name in names:
        if getattr(config, name) is None:
            setattr(config, name, rows[f"{section}.{name}"].read_variable())


def find_setting(name: str) -> Setting | None:
    """Return the setting's row; of older releases by the start of its name."""
    if name in settings():
        return settings()[name]
    for start, (variable, section) in PREFIXES.items():
        if name.startswith(start):
            rest = name.removeprefix(start)
            path = "" if section == "compile" else f"{section}.{rest}"
            return Setting(name, "str", variable=variable + rest.upper(), path=path)
    return None


def ignored_settings() -> Mapping[str, str]:
    """Return setting -> reason, for settings without meaning here."""
    return {name: setting.reason for name, setting in settings().items() if setting.reason}


def defaults(*starts: str) -> dict[str, Any]:
    """Return the defaults of the settings whose names start so."""
    found = {name: setting.default for name, setting in settings().items() if name.startswith(starts)}
    return {name: default for name, default in found.items() if default is not None}
