"""Notes on given options that do nothing in a run, and on unused sections."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from accel_core.config.sources import dotted
from accel_core.contract.options import Path, default_of, describe, options_of
from accel_core.plugins.discovery import Discovery, Record

if TYPE_CHECKING:
    from accel_core.config.resolve import Resolved
    from accel_core.config.sources import SourceValue

UNSCALED: Final = ("no", "fp32", "bf16")
"""Precisions of core that scale no loss; others answer for themselves."""


def unused_options(
    resolved: Resolved, used: Collection[str], *, precision: str, processes: int | None
) -> Iterator[str]:
    """Write a sentence for each option that is set and has no effect.

    Args:
        resolved: the merged config.
        used: names of the chosen plugins, and aliases of strategies; sections of others are skipped.
        precision: the chosen precision plugin.
        processes: the world's size; None where it is not known yet.
    """
    sections = {"grad_scaler": precision in UNSCALED, "process_group": processes == 1}
    remedies = {"grad_scaler": "mixed_precision is fp16", "process_group": "there are several processes"}
    for path, value in resolved.settings.items():
        plugin = path[1] if path[0] == "strategies" else path[0]
        section = resolved.section(path[:-1])
        is_core = path[0] != "strategies" and path[0] not in resolved.config.plugins
        if section is None or not (is_core or plugin in used) or not _is_set(section, path[-1]):
            continue
        needed = describe(options_of(type(section))[path[-1]][0]).only_with
        # A script may serve one process and many, so what Python says is not looked at.
        if sections.get(path[0]) and value.source != "python":
            yield _sentence(path, value.origin, remedies[path[0]])
        elif needed and not _is_set(section, needed):
            yield _sentence(path, value.origin, f"{dotted((*path[:-1], needed))} is set")


def unused_profile_options(resolved: Resolved) -> Iterator[str]:
    """Write a sentence for each option of `profile` if nothing was profiled."""
    for path, value in resolved.settings.items():
        if path[0] == "profile" and _is_set(resolved.config.profile, path[-1]):
            yield _sentence(path, value.origin, "accelerator.profile() is called")


def _sentence(path: Path, origin: str, condition: str) -> str:
    return f"{dotted(path)} ({origin}) does nothing here: it counts only where {condition}"


def _is_set(section: Any, name: str) -> bool:
    """Tell if an option differs from its default; the word `no` unsets a backend."""
    attribute, _ = options_of(type(section)).get(name, (None, None))
    if attribute is None:
        return False
    value = getattr(section, attribute.name)
    return value not in ("no", None) and value != default_of(attribute, section)


SETTING: Final[Mapping[str, str]] = {
    "device": "device",
    "precision": "mixed_precision",
    "strategy": "strategy",
    "launcher": "launch.launcher",
    "extension": "extensions",
    "tracker": "log_with",
}
"""The option that names a plugin of a slot."""

TYPED: Final = ("environment", "flag")
"""Sources that are given for one run, whereas a file may serve several."""


def unused_sections(
    resolved: Resolved, used: Collection[str], discovery: Discovery
) -> Iterator[tuple[Record, SourceValue, str]]:
    """(plugin, option given for it, setting that selects it) of each unused plugin."""
    first: dict[str, SourceValue] = {}
    for path, value in resolved.settings.items():
        if path[0] not in used and (path[0] not in first or value.source in TYPED):
            first[path[0]] = value
    for name, value in first.items():
        record = discovery.get(name)
        if record is not None and record.slot in SETTING:  # else a section of core, or `strategies`
            yield record, value, _setting(record, resolved, value.source == "flag")


def _setting(record: Record, resolved: Resolved, as_flag: bool) -> str:
    """Name the setting that selects the plugin beside those selected already."""
    path, config = SETTING[record.slot], resolved.config
    several = {"extension": config.extensions, "tracker": config.log_with}
    names = [*several.get(record.slot, ()), record.name]
    if as_flag:
        return f"--{path.removeprefix('launch.').replace('_', '-')} {','.join(names)}"
    return f"{path}: [{', '.join(names)}]" if record.slot in several else f"{path}: {record.name}"


def auto_may_take(record: Record, resolved: Resolved) -> bool:
    """Tell if `auto` may select the plugin on a machine that has its hardware."""
    asked = {"device": resolved.config.device, "strategy": resolved.config.strategy}.get(record.slot)
    return asked == "auto" and record.card is not None and record.card.priority is not None
