"""Options that were given and do nothing, because another one that they need is not set."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from accel_core.config.sources import dotted
from accel_core.contract.options import Path, default_of, describe, options_of
from accel_core.plugins.discovery import Discovery, Record

if TYPE_CHECKING:
    from accel_core.config.resolve import Resolved
    from accel_core.config.sources import SourceValue

__all__ = ["auto_may_take", "idle_options", "idle_profile", "unused_sections"]

UNSCALED: Final = ("no", "fp32", "bf16")
"""Precisions of core that scale no loss; others answer for themselves."""


def idle_options(
    resolved: Resolved, used: Collection[str], *, precision: str, processes: int | None
) -> Iterator[str]:
    """A sentence for each option that differs from its default and changes nothing.

    Args:
        resolved: the merged config.
        used: names of the chosen plugins, and aliases of strategies; sections of others are skipped.
        precision: the chosen precision plugin.
        processes: the world's size; None where it is not known yet.
    """
    sections = {"grad_scaler": precision in UNSCALED, "process_group": processes == 1}
    remedies = {"grad_scaler": "mixed_precision is fp16", "process_group": "there are several processes"}
    for path, given in resolved.settings.items():
        held, used_now = resolved.section(path[:-1]), path[0] != "strategies" or path[1] in used
        if held is None or not used_now or (path[0] in resolved.config.plugins and path[0] not in used):
            continue
        if not _differs(held, path[-1]):
            continue
        needed = describe(options_of(type(held))[path[-1]][0]).only_with
        if sections.get(path[0]) and given.source != "python":  # one script runs on one process and on many
            yield _sentence(path, given.origin, remedies[path[0]])
        elif needed and not _differs(held, needed):
            yield _sentence(path, given.origin, f"{dotted((*path[:-1], needed))} is set")


def idle_profile(resolved: Resolved) -> Iterator[str]:
    """A sentence for each option of section `profile`, of a run that ends and was not profiled by it."""
    for path, given in resolved.settings.items():
        if path[0] == "profile" and _differs(resolved.config.profile, path[-1]):
            yield _sentence(path, given.origin, "accelerator.profile() is called")


def _sentence(path: Path, origin: str, condition: str) -> str:
    return f"{dotted(path)} ({origin}) does nothing here: it counts only where {condition}"


def _differs(section: Any, name: str) -> bool:
    """Whether an option is set; the word `no` unsets a backend."""
    found = options_of(type(section)).get(name)
    if found is None:
        return False
    value = getattr(section, found[0].name)
    return value not in ("no", None) and value != default_of(found[0], section)


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
"""Sources that speak of this very run, where a file may serve several."""


def unused_sections(
    resolved: Resolved, used: Collection[str], discovery: Discovery
) -> Iterator[tuple[Record, SourceValue, str]]:
    """(plugin, an option given for it, the setting that chooses it) for each plugin not among `used`."""
    found: dict[str, SourceValue] = {}
    for path, given in resolved.settings.items():
        if path[0] not in used and (path[0] not in found or given.source in TYPED):
            found[path[0]] = given
    for name, given in found.items():
        record = discovery.get(name)
        if record is not None and record.slot in SETTING:  # else a section of core, or `strategies`
            yield record, given, _setting(record, resolved, given.source == "flag")


def _setting(record: Record, resolved: Resolved, as_flag: bool) -> str:
    """What a user writes to choose the plugin beside those that are chosen already."""
    path, config = SETTING[record.slot], resolved.config
    several = {"extension": config.extensions, "tracker": config.log_with}
    names = [*several.get(record.slot, ()), record.name]
    if as_flag:
        return f"--{path.removeprefix('launch.').replace('_', '-')} {','.join(names)}"
    return f"{path}: [{', '.join(names)}]" if record.slot in several else f"{path}: {record.name}"


def auto_may_take(record: Record, resolved: Resolved) -> bool:
    """Whether the same file chooses the plugin on a machine that has it."""
    asked = {"device": resolved.config.device, "strategy": resolved.config.strategy}.get(record.slot)
    return asked == "auto" and record.card is not None and record.card.priority is not None
