"""What core may say of things it does not have: plugins not installed, flags of other launchers.

Both are data (`known.yaml`), so that core itself names no vendor.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from attrs import frozen

from accel_core.config.known import Known, known

__all__ = ["Known", "OldFlag", "known_plugins", "old_flag"]


@frozen(kw_only=True)
class OldFlag:
    """A flag that people bring from another launcher."""

    takes: int
    """How many values follow it."""
    advice: str


def known_plugins() -> tuple[Known, ...]:
    """The first-party plugins, installed or not."""
    return tuple(known().values())


def old_flag(spelling: str) -> OldFlag | None:
    """What `--num_processes` and its kin became; families match by their prefix."""
    name = spelling.partition("=")[0].replace("_", "-")
    flags = _flags()
    prefix = next((key for key in flags if key.endswith("*") and name.startswith(key[:-1])), "")
    row = flags.get(name) or flags.get(prefix)
    return None if row is None else OldFlag(takes=int(row.get("takes", 1)), advice=str(row["advice"]))


@cache
def _flags() -> dict[str, dict[str, Any]]:
    import yaml

    text = files("accel_core").joinpath("known.yaml").read_text(encoding="utf-8")
    flags: dict[str, dict[str, Any]] = yaml.safe_load(text)["flags"]
    return flags
