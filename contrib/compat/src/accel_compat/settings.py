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

from accel_compat.configs.enums import DynamoBackend
from accel_compat.environment.variables import parse_flag_from_env, parse_number_from_env

MEGATRON: Final = "megatron_lm_"
STRATEGIES: Final = {"use_fsdp": "fsdp", "use_deepspeed": "deepspeed", "use_megatron_lm": "megatron"}
"""Switch -> the strategy that it chooses, whose section has the same name."""
SECTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("deepspeed_config", "megatron_lm_config", "mpirun_config"), ""),
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "parallelism_config": "parallelism_config_",
    "fp8_config": "fp8_",
}
"""Section of a file -> the start that its keys get as settings."""
FP8_PRODUCTS: Final = tuple(f"ACCELERATE_FP8_OVERRIDE_{name}" for name in ("FPROP", "DGRAD", "WGRAD"))
"""The variables that say `fp8_override_linear_precision`, one for each product."""
WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "mixed_precision": ("no", "fp16", "bf16", "fp8"),
    "dynamo_backend": tuple(backend.value.lower() for backend in DynamoBackend),
    "dynamo_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "fsdp_version": ("1", "2"),
    "fp8_backend": ("ao", "te", "msamp"),
    **dict.fromkeys(("fp8_format", "fp8_fp8_format"), ("HYBRID", "E4M3", "E5M2")),
    **dict.fromkeys(("fp8_amax_compute_algo", "fp8_amax_compute_algorithm"), ("max", "most_recent")),
    "fp8_opt_level": ("O1", "O2"),
    "parallelism_config_cp_backend": ("torch",),
    "parallelism_config_sp_backend": ("deepspeed",),
}
"""Setting -> the words that it takes, in any case of letters."""


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
    def owner(self) -> str:
        """The strategy that the setting is for, or else the first part of the path."""
        return STRATEGIES["use_megatron_lm"] if self.name.startswith(MEGATRON) else self.section

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
            return parse_flag_from_env(self.variable)
        kind = type(self.unset).__name__ if isinstance(self.unset, (int, float)) else self.kind
        return (
            text
            if kind not in ("int", "float")
            else parse_number_from_env(self.variable, float if kind == "float" else int)
        )

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


def fill_from_settings(config: Any, start: str, *names: str) -> None:
    """Fill the fields that are None from the variables of the settings START + field."""
    for name in names:
        if getattr(config, name) is None:
            setattr(config, name, settings()[f"{start}{name}"].read_variable())


def find_setting(name: str) -> Setting | None:
    """Return the setting's row, if it has one."""
    return settings().get(name)


def ignored_settings() -> Mapping[str, str]:
    """Return setting -> reason, for settings without meaning here."""
    return {name: setting.reason for name, setting in settings().items() if setting.reason}


def defaults(*starts: str) -> dict[str, Any]:
    """Return the defaults of the settings whose names start so."""
    found = {name: setting.default for name, setting in settings().items() if name.startswith(starts)}
    return {name: default for name, default in found.items() if default is not None}
