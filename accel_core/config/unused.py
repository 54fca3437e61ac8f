"""Notes on options that do nothing in a run, and on sections of plugins that the run does not use."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

from accel_core.config.sections import SLOTS
from accel_core.config.sources import dotted
from accel_core.contract.options import options_of
from accel_core.plugins.discovery import Discovery, Record

if TYPE_CHECKING:
    from accel_core.config.resolve import Resolved
    from accel_core.config.sources import Setting


def unused_options(resolved: Resolved, used: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each option that is set without the option that it needs.

    Args:
        resolved: the config.
        used: names of the chosen plugins, and aliases of strategies; sections of other plugins are skipped.
    """
    for path, setting in resolved.settings.items():
        section, plugin = resolved.sections.get(path[:-1]), path[path[0] == "strategies"]
        option = options_of(type(section)).get(path[-1]) if section else None
        needed = option.only_with if option else ""
        if not needed or (plugin in resolved.config.plugins and plugin not in used):
            continue
        if _is_set(section, path[-1]) and not _is_set(section, needed):
            about, condition = dotted(path), dotted((*path[:-1], needed))
            yield f"{about} ({setting.origin}) does nothing here: it counts only where {condition} is set"


def _is_set(section: object, name: str) -> bool:
    """Return True if an option differs from its default; the word `no` unsets a backend."""
    option = options_of(type(section))[name]
    return getattr(section, option.attribute) not in ("no", None, option.default_for(section))


TYPED: Final = ("environment", "flag")
"""Sources that are written for one run, whereas a file may serve several runs."""


def unused_sections(
    resolved: Resolved, used: Collection[str], discovery: Discovery
) -> Iterator[tuple[Record, Setting, str]]:
    """Yield (plugin, option set for it, setting that would select it) of each unused plugin."""
    first: dict[str, Setting] = {}
    for path, setting in resolved.settings.items():
        if path[0] not in used and (path[0] not in first or setting.origin.source in TYPED):
            first[path[0]] = setting
    for name, setting in first.items():
        record = discovery.get(name)
        path = next((path for path, slot in SLOTS.items() if record and slot == record.slot), ())
        if record and path:  # not a section of core, nor `strategies`
            yield record, setting, f"{dotted(path)}: {record.name}"


def auto_may_take(record: Record, resolved: Resolved) -> bool:
    """Return True if `auto` may select the plugin on a machine that has its hardware."""
    asked = {"device": resolved.config.device, "strategy": resolved.config.strategy}.get(record.slot)
    return asked == "auto" and record.card is not None and record.card.priority is not None
