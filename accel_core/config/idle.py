"""Options that were given and do nothing, because another one that they need is not set."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Final

from accel_core.config.options import Path, default_of, describe, options_of
from accel_core.config.sources import spell

if TYPE_CHECKING:
    from accel_core.config.resolve import Resolved

__all__ = ["idle_options", "idle_profile"]

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
            yield _sentence(path, given.origin, f"{spell((*path[:-1], needed))} is set")


def idle_profile(resolved: Resolved) -> Iterator[str]:
    """A sentence for each option of section `profile`, of a run that ends and was not profiled by it."""
    for path, given in resolved.settings.items():
        if path[0] == "profile" and _differs(resolved.config.profile, path[-1]):
            yield _sentence(path, given.origin, "accelerator.profile() is called")


def _sentence(path: Path, origin: str, condition: str) -> str:
    return f"{spell(path)} ({origin}) does nothing here: it counts only where {condition}"


def _differs(section: Any, name: str) -> bool:
    """Whether an option is set; the word `no` unsets a backend."""
    found = options_of(type(section)).get(name)
    if found is None:
        return False
    value = getattr(section, found[0].name)
    return value not in ("no", None) and value != default_of(found[0], section)
