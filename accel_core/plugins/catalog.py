"""Hints for plugins that are not installed, and for flags and files of other launchers.

The hints are data (`catalog.yaml`), so that core itself names no vendor. An install hint quotes this data
only, never the text that a user typed.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from accel_core.contract.arguments import did_you_mean, quoted
from accel_core.contract.card import Slot
from accel_core.contract.options import options_of
from accel_core.plugins.discovery import Discovery, discover, load


class CatalogEntry(NamedTuple):
    """A plugin of this repository: name, slot and distribution."""

    name: str
    slot: str
    distribution: str
    folder: str
    """Folder of the distribution in this repository."""
    also: tuple[str, ...] = ()
    """Words that select the plugin, beside its name."""
    dimensions: tuple[str, ...] = ()
    """Dimensions of section `parallelism` that the plugin divides ranks along."""


def catalog_entries() -> tuple[CatalogEntry, ...]:
    """Return the plugins of this repository, installed or not."""
    rows: list[dict[str, Any]] = _data()["plugins"]
    listed = ("also", "dimensions")
    return tuple(CatalogEntry(**{**row, **{it: tuple(row.get(it, ())) for it in listed}}) for row in rows)


def catalog_entry(name: str) -> CatalogEntry | None:
    """Return the plugin of this repository with this name, or else with this word; installed or not."""
    entries = catalog_entries()
    named = (plugin for plugin in entries if plugin.name == name)
    return next(named, None) or next((plugin for plugin in entries if name in plugin.also), None)


def not_installed(name: str, slot: Slot, discovery: Discovery) -> str:
    """Return the error text for a name that no installed plugin of the slot has."""
    record, entry = discovery.get(name), catalog_entry(name)
    installed = [record.name for record in discovery.of(slot)]
    if record is not None:
        remedy = f"; {name} is a {record.slot}"
    elif entry is not None:
        remedy = f"; {install_hint(entry.folder)}"
    else:
        remedy = did_you_mean(name, installed) or f"; installed: {', '.join(installed) or 'none'}"
    return f"no {slot} {quoted(name)} is installed{remedy}"


def install_hint(path: str) -> str:
    """Return the command that installs a package of this repository.

    The packages are not on an index yet, so anybody could take their names there. Until they are published,
    this function alone decides that a hint names a folder of a clone.

    Args:
        path: folder of the package, with extras: `backends/acme[runtime]`.
    """
    import shlex  # late: start-up need not wait for it

    return f"in a clone of accel-core: pip install {shlex.quote(f'./{path}')}"


def renamed_flag(spelling: str) -> str | None:
    """Return the remedy for another launcher's flag, such as `--num_processes`; None if unknown."""
    name = spelling.replace("_", "-")
    flags: dict[str, str] = _data()["flags"]
    prefix = next((key for key in flags if key.endswith("*") and name.startswith(key[:-1])), "")
    return flags.get(name) or flags.get(prefix) or _option_of_family(name)


def other_file(key: str, discovery: Discovery) -> str | None:
    """Return the remedy for a key of another launcher's config file; None if unknown."""
    about = _data()["files"].get(key)
    if about is None:
        return None
    entry = catalog_entry(about["plugin"])
    if entry is None or discovery.get(entry.name) is not None:
        return str(about["remedy"])
    return f"{about['remedy']} ({install_hint(entry.folder)})"


def _option_of_family(name: str) -> str | None:
    """Return the remedy for a flag such as --fsdp_offload_params: the dotted flag that replaces it."""
    for prefix, family in _data()["families"].items():
        plugin = catalog_entry(family["plugin"])
        if plugin is None or not name.startswith(prefix):
            continue
        rest = name[2:] if family.get("whole") else name.removeprefix(prefix)
        option = family.get("renamed", {}).get(rest, rest)
        choice = f"use --{plugin.slot} {plugin.name} with --{plugin.name}"
        record = discover().get(plugin.name)
        if record is None or not record.card or not record.card.config:
            return f"{choice}.OPTION VALUE ({install_hint(plugin.folder)})"
        if option.replace("-", "_") in options_of(load(record, record.card.config)):
            return f"{choice}.{option} VALUE"
        other = f"--{plugin.name} has no such option; `accel config schema {plugin.name}` lists them"
        return str(family.get("rest", other)).replace("OPTION", rest.replace("-", "_"))
    return None


@cache
def _data() -> dict[str, Any]:
    import yaml

    data: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("catalog.yaml").read_text("utf-8"))
    return data


def strategy_hint(discovery: Discovery) -> str:
    """Return the remedy if `strategy: auto` finds no strategy."""
    names = [it.name for it in discovery.of("strategy") if it.status == "available" and it.name != "single"]
    if names:
        verb = "is" if len(names) == 1 else "are"
        return f"{', '.join(names)} {verb} installed and taken only when named: --strategy {names[0]}"
    return next(install_hint(entry.folder) for entry in catalog_entries() if entry.slot == "strategy")


def unknown_device(asked: str, discovery: Discovery) -> str:
    """Return the error text for a device that neither a plugin nor torch knows; empty for other devices."""
    kind = asked.partition(":")[0]
    record = discovery.get(kind)
    if kind in ("auto", "cpu") or (record is not None and record.slot == "device"):
        return ""
    if record is not None and record.fault == "conflict":
        return f"{quoted(kind)} cannot be used: {record.reason}"
    try:
        import torch

        torch.get_device_module(kind)
    except ImportError:
        return ""  # not installed here: only torch knows its device types
    except (RuntimeError, AttributeError):
        remedy = _known_devices(kind, discovery)
        return f"{quoted(kind)} is neither an installed device plugin nor a device type of this torch{remedy}"
    return ""


def _known_devices(kind: str, discovery: Discovery) -> str:
    """Return the remedy for an unknown device, to append to a message."""
    entry, usual = catalog_entry(kind), _data()["devices"].get(kind)
    if entry is not None and entry.slot == "device":
        return f"; {install_hint(entry.folder)}"
    if usual is not None:
        return f"; write {usual}, or auto"
    return did_you_mean(kind, ["auto", "cpu", *(record.name for record in discovery.of("device"))])
