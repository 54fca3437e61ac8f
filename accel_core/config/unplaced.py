"""Reasons why a value is for no option, with what was meant."""

from __future__ import annotations

from typing import NamedTuple

from accel_core.config.sections import CORE, Sections
from accel_core.config.sources import ConfigProblem, SourceValue, dotted
from accel_core.contract.arguments import did_you_mean
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Path, options_of
from accel_core.plugins import catalog


class Unplaced(NamedTuple):
    """A value for an option or a plugin that is not there."""

    value: SourceValue
    path: Path
    """Up to the first part that is unknown."""
    section: type | None
    """Class of the section without this key; None if the plugin has no class."""
    plugin: SourceValue
    """The key, or a strategy's key `plugin`, that names the plugin."""

    def explain(self, sections: Sections) -> ConfigProblem | str:
        """Say why the value is a mistake; a str notes why it is kept unread instead."""
        origin, name = self.value.origin, self.plugin.value
        if self.section is not None:
            return ConfigProblem(origin, self.path, f"unknown key{_hint(self.path, self.section, sections)}")
        record, entry = sections.discovery.get(name), catalog.catalog_entry(name)
        reason = sections.faults.get(name)
        if entry and record is None:
            reason = f"{entry.slot} {name} is not installed; {catalog.install_hint(entry.folder)}"
        if reason:
            return f"{dotted(self.path)} ({origin}) is kept unread: {reason}"
        if record and record.slot != "command":
            return ConfigProblem(origin, self.path, f"the plugin {name} has no options")
        if len(self.path) == 1:
            return ConfigProblem(origin, self.path, f"unknown key{_hint(self.path, RunConfig, sections)}")
        message = catalog.not_installed(name, "strategy", sections.discovery)
        return ConfigProblem(self.plugin.origin, self.plugin.path, message)


def _hint(path: Path, cls: type, sections: Sections) -> str:
    """Hint at a similar name, or at the same key in another section."""
    *section, name = path
    names = list(options_of(cls))
    if cls is RunConfig:
        if other := catalog.other_file(name, sections.discovery):
            return f"; {other}"
        plugins = [record.name for record in sections.discovery.records if record.slot != "command"]
        names = [*CORE, *plugins, *(plugin.name for plugin in catalog.catalog_entries())]
    similar = did_you_mean(name, names)
    owners = ["the top level"] if name in CORE else []
    owners += [other for other, cls in sections.all() if name in options_of(cls) and [other] != section]
    for entry in catalog.catalog_entries():
        if name in entry.keys and sections.discovery.get(entry.name) is None:
            owners.append(f"{entry.name} (not installed; {catalog.install_hint(entry.folder)})")
    return f"; it is an option of {' and '.join(owners)}" if owners and not similar else similar
