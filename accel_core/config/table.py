"""One flat table of a config: path of an option -> its typed value and origin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import attrs
from attrs import define, evolve, field

from accel_core.config.convert import convert_option, plain, readings
from accel_core.config.sections import CORE, Sections
from accel_core.config.sources import ConfigProblem, RawText, Setting, dotted
from accel_core.contract.arguments import did_you_mean
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Option, Path, given_options, masked, options_of
from accel_core.plugins import catalog

ALIASES: Final[Mapping[Path, Path]] = {("accumulation", "num_steps"): ("gradient_accumulation_steps",)}
"""A second name of an option -> the first."""

_WRITTEN: Final = ("file", "environment", "flag")
"""Sources of text, in which no Python object can be."""


@define(eq=False, repr=False)
class Table:
    """The settings of all sources, the stronger over the weaker, and every mistake in them."""

    sections: Sections
    settings: dict[Path, Setting] = field(factory=dict)
    objects: dict[Path, object] = field(factory=dict)
    """Path of a section -> the object that Python gave; a run holds that very object."""
    strategies: dict[str, Setting] = field(factory=dict)
    """Alias in `strategies` -> the setting that names its plugin."""
    places: dict[Path, str] = field(factory=dict)
    """Path of a key in the file -> its place."""
    problems: list[ConfigProblem] = field(factory=list)
    notes: dict[str, None] = field(factory=dict)
    """Settings that were left unread, and why. A dict, for the order."""

    def read(self, settings: Iterable[Setting]) -> Table:
        """Put settings into the table, the weakest source first."""
        parts = [part for setting in settings for part in self._spelt(setting)]
        # Before any is placed: another source may name the plugin of an alias.
        named = [it for it in parts if it.path[0] == "strategies" and it.path[2:] == ("plugin",)]
        self.strategies |= {setting.path[1]: setting for setting in named}
        for setting in parts:
            self._place(setting)
        self.settings |= {alias: self.settings[it] for alias, it in ALIASES.items() if it in self.settings}
        return self

    def with_proposals(self, settings: Iterable[Setting]) -> Table:
        """Return a table that has these settings too.

        What is typed is not read again: a value may be a generator.
        """
        return evolve(self, settings=dict(self.settings), notes=dict(self.notes), problems=[]).read(settings)

    # -- from a setting to an option -----------------------------------------------------------------

    def _refuse(self, setting: Setting, message: str, path: Path | None = None) -> None:
        self.problems.append(ConfigProblem(setting.origin, path or setting.path, message))

    def _spelt(self, setting: Setting) -> Iterator[Setting]:
        """Put a setting under its section's name; split `strategies` into single options."""
        path, value = setting.path, setting.value
        is_object = attrs.has(type(value)) and (not path or path[0] == "strategies")
        name = self.sections.configured_by(value) if is_object else None
        if not path and name is None:
            classes = ", ".join(sorted(cls.__name__ for _, cls in self.sections.all()))
            self._refuse(setting, f"configures nothing that is installed; what can be given: {classes}")
        elif not path and name:
            yield setting._replace(path=(name,))
        elif not all(path):
            self._refuse(setting, "names no option; `accel config show` lists them")
        elif path[0] != "strategies":
            yield setting._replace(path=(self.sections.spell(path[0]), *path[1:]))
        elif name:
            yield setting._replace(path=(*path, "plugin"), value=name)
            yield setting
        elif len(path) > 2:
            yield setting
        else:
            parts = list(self._split(setting))
            yield from (inner for part in parts for inner in self._spelt(part))
            if len(path) == 2 and not parts:
                yield setting  # names no plugin

    def _split(self, setting: Setting, cls: type | None = None) -> Iterator[Setting]:
        """Yield the settings of a section's keys; of an object, its given arguments."""
        raw, path = setting.value, setting.path
        if isinstance(raw, RawText):
            raw = next(readings(raw))
        if cls and isinstance(raw, cls):
            if path in self.objects:
                self._refuse(setting, f"a second object for section {dotted(path)}; give one")
            self.objects[path] = raw
            raw = given_options(raw)
        if isinstance(raw, Mapping):
            is_file = setting.source == "file"
            for key in raw:
                inner = (*path, str(key))
                origin = self.places.get(inner, setting.origin) if is_file else setting.origin
                yield Setting(inner, raw[key], setting.source, origin)
        elif raw is not None:  # a section whose keys are all commented out
            self._refuse(setting, f"is a section: expected keys and values, got {raw!r}")

    def _place(self, setting: Setting) -> None:
        """Place a setting of core, of a plugin, or of a named strategy."""
        path = setting.path
        if path[0] != "strategies":
            is_core = path[0] in CORE
            self._place_in(() if is_core else path[:1], RunConfig if is_core else path[0], setting)
            return
        plugin = self.strategies.get(path[1])
        if plugin is None or not isinstance(plugin.value, str) or not plugin.value:
            self._refuse(setting, "needs a key 'plugin' that names its strategy", path[:2])
        elif path[2:] != ("plugin",):
            self._place_in(path[:2], str(plugin.value), setting)
        else:
            self._set(setting, options_of(RunConfig)["strategy"])

    def _place_in(self, section: Path, owner: type | str, setting: Setting) -> None:
        """Place a setting for a section, or for an option in it.

        owner: the section's class, or the name of its plugin.
        """
        cls = owner if isinstance(owner, type) else self.sections.class_of(owner)
        path = setting.path[: len(section) + 1]
        if cls is None:
            self._leave_unread(setting, str(owner), path if len(section) > 1 else section)
        elif setting.path == section:
            for part in self._split(setting, cls):
                self._place_in(section, cls, part)
        elif (option := options_of(cls).get(path[-1])) is None:
            self._refuse(setting, f"unknown key{self._hint(path, cls)}", path)
        elif option.section:
            self._place_in(path, option.section, setting)
        elif setting.path != path:
            self._refuse(setting, f"has no keys of its own; give it whole, not {dotted(setting.path)}", path)
        else:
            self._set(setting, option)

    def _set(self, setting: Setting, option: Option) -> None:
        """Convert the value of an option, and merge it with that of weaker sources."""
        raw, path = setting.value, ALIASES.get(setting.path, setting.path)
        if raw is None and path != setting.path:
            return  # unset, so that the first name counts
        is_written = setting.source in _WRITTEN
        try:
            if option.python_only and is_written:
                raise ValueError("can be given in Python only")
            if option.converter and not is_written:
                raw = option.converter(raw)
            value = convert_option(raw, option)
        except (TypeError, ValueError) as error:
            self._refuse(setting, str(error))
        else:
            self._merge(setting._replace(path=path, value=value), option.secret)

    def _merge(self, new: Setting, secret: bool) -> None:
        """Let the stronger source win; refuse a contradiction that must be a mistake.

        Python may not contradict a flag or a variable, and a proposal may not contradict any source. A
        source may not contradict itself either, by two names of one option for instance.
        """
        old = self.settings.setdefault(new.path, new)
        if old is new or old.value == new.value:
            if new.source != "proposal":
                self.settings[new.path] = new
            return
        ours, theirs = (repr(masked(plain(value, masks=True), secret)) for value in (new.value, old.value))
        if new.source == "proposal":
            self._refuse(new, f"wants {ours}, but it is {theirs} by {old.origin}")
        elif new.source == old.source != "preset" or (
            new.source == "python" and old.source not in ("preset", "file")
        ):
            self._refuse(new, f"{ours} here, but {theirs} by {old.origin}; give it once")
        else:
            origin = f"{new.origin} (over {theirs} from {old.origin})"
            self.settings[new.path] = new._replace(origin=origin)

    # -- settings for no option ----------------------------------------------------------------------

    def _leave_unread(self, setting: Setting, name: str, path: Path) -> None:
        """Note a section that this installation cannot read; refuse one that no installation has."""
        discovery = self.sections.discovery
        record, entry = discovery.get(name), catalog.catalog_entry(name)
        reason = self.sections.faults.get(name)
        if entry and record is None:
            reason = f"{entry.slot} {name} is not installed; {catalog.install_hint(entry.folder)}"
        if reason:
            self.notes[f"{dotted(path)} ({setting.origin}) is kept unread: {reason}"] = None
        elif record and record.slot != "command":
            self._refuse(setting, f"the plugin {name} has no options", path)
        elif len(path) == 1:
            self._refuse(setting, f"unknown key{self._hint(path, RunConfig)}", path)
        else:
            plugin = self.strategies[path[1]]
            self._refuse(plugin, catalog.not_installed(name, "strategy", discovery))

    def _hint(self, path: Path, cls: type) -> str:
        """Hint at a similar name, or at the same key in another section."""
        *section, name = path
        names, discovery = list(options_of(cls)), self.sections.discovery
        if cls is RunConfig:
            if other := catalog.other_file(name, discovery):
                return f"; {other}"
            plugins = [record.name for record in discovery.records if record.slot != "command"]
            names = [*CORE, *plugins, *(plugin.name for plugin in catalog.catalog_entries())]
        if similar := did_you_mean(name, names):
            return similar
        owners = ["the top level"] if name in CORE else []
        owners += [it for it, cls in self.sections.all() if name in options_of(cls) and [it] != section]
        return f"; it is an option of {' and '.join(owners)}" if owners else ""
