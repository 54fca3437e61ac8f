"""What core may say of things it does not have: plugins not installed, flags of other launchers.

Both are data (`known.yaml`), so that core itself names no vendor. Install hints quote this list only,
never what somebody typed.
"""

from __future__ import annotations

import shlex
from functools import cache
from importlib.resources import files
from typing import Any

from attrs import frozen

from accel_core.contract.card import Slot
from accel_core.contract.suggest import did_you_mean
from accel_core.plugins.discovery import Discovery

__all__ = [
    "Known",
    "absence",
    "absent_device",
    "install_hint",
    "known_plugin",
    "known_plugins",
    "old_flag",
    "strategy_to_name",
    "unknown_device",
]


@frozen(kw_only=True)
class Known:
    """A first-party plugin: its name, slot and options, and the distribution that ships it."""

    name: str
    slot: str
    distribution: str
    folder: str
    """Of the distribution, in this repository."""
    keys: tuple[str, ...] = ()


def known_plugins() -> tuple[Known, ...]:
    """The first-party plugins, installed or not."""
    return tuple(Known(**{**row, "keys": tuple(row["keys"])}) for row in _data()["plugins"])


def known_plugin(name: str) -> Known | None:
    """The first-party plugin of that name, installed or not."""
    return next((plugin for plugin in known_plugins() if plugin.name == name), None)


def absence(name: str, slot: Slot, discovery: Discovery) -> str:
    """That no plugin of the slot has this name, and what to do."""
    record, missing = discovery.get(name), known_plugin(name)
    installed = [record.name for record in discovery.of(slot)]
    if record is not None:
        remedy = f"; {name} is a {record.slot}"
    elif missing is not None:
        remedy = f"; {install_hint(missing.folder)}"
    else:
        remedy = did_you_mean(name, installed) or f"; installed: {', '.join(installed) or 'none'}"
    return f"no {slot} {name!r} is installed{remedy}"


def absent_device(kind: str, discovery: Discovery) -> str:
    """What to write, or to install, instead of a device that nobody knows."""
    missing, usual = known_plugin(kind), _data()["devices"].get(kind)
    if missing is not None and missing.slot == "device":
        return f"; {install_hint(missing.folder)}"
    if usual is not None:
        return f"; write {usual}, or auto"
    return did_you_mean(kind, ["auto", "cpu", *(record.name for record in discovery.of("device"))])


def install_hint(path: str) -> str:
    """How to install a package of this repository.

    path: its folder, with extras: `backends/acme[runtime]`.

    No package of ours is on an index yet, so a stranger could take its name there: until they are
    published, a hint names a folder of a clone. This is the only place that decides so.
    """
    return f"in a clone of accel-core: pip install {shlex.quote(f'./{path}')}"


def old_flag(spelling: str) -> str | None:
    """What to write instead of `--num_processes` and its kin; families match by their prefix."""
    name = spelling.replace("_", "-")
    flags: dict[str, str] = _data()["flags"]
    prefix = next((key for key in flags if key.endswith("*") and name.startswith(key[:-1])), "")
    return flags.get(name) or flags.get(prefix) or _option_of_family(name)


def _option_of_family(name: str) -> str | None:
    """The dotted flag of the option that a flag such as --fsdp_offload_params set."""
    for prefix, family in _data()["families"].items():
        plugin = known_plugin(family["plugin"])
        if plugin is None or not name.startswith(prefix):
            continue
        rest = name[2:] if family.get("whole") else name.removeprefix(prefix)
        option = family.get("renamed", {}).get(rest, rest)
        choice = f"use --{plugin.slot} {plugin.name} with --{plugin.name}"
        if option.replace("-", "_") in plugin.keys:
            return f"{choice}.{option} VALUE"
        other = f"--{plugin.name} has no such option; `accel config schema {plugin.name}` lists them"
        return str(family.get("rest", other)).replace("OPTION", rest.replace("-", "_"))
    return None


@cache
def _data() -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("known.yaml").read_text("utf-8"))
    return found


def strategy_to_name(discovery: Discovery) -> str:
    """What to do where `strategy: auto` finds none: name one that is usable here, else install one."""
    here = [it.name for it in discovery.of("strategy") if it.status == "available" and it.name != "single"]
    if here:
        verb = "is" if len(here) == 1 else "are"
        return f"{', '.join(here)} {verb} installed and taken only when named: --strategy {here[0]}"
    return next(install_hint(known.folder) for known in known_plugins() if known.slot == "strategy")


def unknown_device(asked: str, discovery: Discovery) -> str:
    """Why no device of that name can be meant; empty if an installed plugin or torch knows it."""
    kind = asked.partition(":")[0]
    record = discovery.get(kind)
    if kind in ("auto", "cpu") or (record is not None and record.slot == "device"):
        return ""
    try:
        import torch

        torch.get_device_module(kind)
    except ImportError:
        return ""  # only torch could say so
    except (RuntimeError, AttributeError):
        about = f"{kind!r} is neither an installed device plugin nor a device type of this torch"
        return about + absent_device(kind, discovery)
    return ""
