"""Pass 2 of a config: one table of typed options, from the values of all sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from attrs import Attribute, define, evolve, field

from accel_core.config.convert import convert_option, format_value, shown
from accel_core.config.sections import CORE, Sections
from accel_core.config.sources import ConfigProblem, LocatedDict, RawText, SourceValue, dotted
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Path, describe, is_secret, options_of, said, section_class
from accel_core.plugins.catalog import not_installed

__all__ = ["ALIASES", "Table"]

ALIASES: Final[Mapping[Path, Path]] = {("accumulation", "num_steps"): ("gradient_accumulation_steps",)}
"""A second name of an option -> the first."""


@define
class Table:
    """Typed options by path. Mistakes are collected, so that all are told at once."""

    sections: Sections
    problems: list[ConfigProblem] = field(factory=list)
    settings: dict[Path, SourceValue] = field(factory=dict)
    """Path of an option -> its typed value, from the strongest source."""
    objects: dict[Path, object] = field(factory=dict)
    """Path of a section -> the object that Python gave; a run holds that very object."""
    aliases: dict[str, SourceValue] = field(factory=dict)
    """Alias in `strategies` -> the name of its plugin."""
    notes: dict[str, None] = field(factory=dict)
    """Sections that were kept unread, and why. A dict, for the order."""

    def read(self, values: Sequence[SourceValue]) -> None:
        """Type and merge all that sources gave, the weakest source first. Called once."""
        located = [part for value in values for part in self._locate(value)]
        for value in located:  # before any option is read: another source may name the plugin of an alias
            if value.path[0] == "strategies" and value.path[2:] == ("plugin",):
                name = str(value.value) if isinstance(value.value, str) else ""  # refused below
                self.aliases[value.path[1]] = evolve(value, value=name)
        for alias, plugin in self.aliases.items():
            other = self.sections.discovery.get(alias)
            if alias == "auto" or (other and other.slot == "strategy" and alias != plugin.value):
                self._refuse(plugin, f"{alias!r} means another strategy; name yours otherwise")
        for value in located:
            self._read(value)

    def with_values(self, values: Sequence[SourceValue]) -> Table:
        """Return a new table with the values of a further source.

        What is typed is not read again: a value may be a generator.
        """
        table = Table(
            self.sections,
            settings=dict(self.settings),
            objects=dict(self.objects),
            aliases=dict(self.aliases),
            notes=dict(self.notes),
        )
        table.read(values)
        return table

    def within(self, path: Path) -> Sequence[Path]:
        """Paths of the options and objects given for a section and the sections in it."""
        return self._index.get(path, ())

    @cached_property
    def _index(self) -> Mapping[Path, list[Path]]:
        # A search through all options for each section would be quadratic.
        index: dict[Path, list[Path]] = {}
        mirrors = [alias for alias, path in ALIASES.items() if path in self.settings]
        for path in (*self.settings, *self.objects, *mirrors):
            for depth in range(len(path) + 1):
                index.setdefault(path[:depth], []).append(path)
        return index

    def _refuse(self, value: SourceValue, message: str, path: Path | None = None) -> None:
        self.problems.append(ConfigProblem(value.origin, value.path if path is None else path, message))

    # -- from what a source gave to single options ---------------------------------------------------

    def _locate(self, value: SourceValue) -> Iterator[SourceValue]:
        """Put the value under its section's true name; split `strategies` into options."""
        path = value.path
        if not path:
            name = self.sections.configured_by(value.value)
            if name is not None:
                yield evolve(value, path=(name,))
                return
            classes = ", ".join(sorted(cls.__name__ for _, cls in self.sections.all()))
            self._refuse(value, f"configures nothing that is installed; what can be given: {classes}")
        elif path[0] != "strategies":
            yield evolve(value, path=(self.sections.spell(path[0]), *path[1:]))
        elif len(path) > 2:
            yield value
        else:
            name = self.sections.configured_by(value.value) if len(path) == 2 else None
            parts = list(self._split(value, self.sections.class_of(name or "")))
            if name:
                parts.insert(0, evolve(value, path=(*path, "plugin"), value=name))
            for part in parts:
                yield from self._locate(part)
            if len(path) == 2 and not parts:
                yield value

    def _split(self, value: SourceValue, cls: type | None) -> Iterator[SourceValue]:
        """Yield the values of a section's keys; of an object, its given arguments."""
        raw = value.value
        if isinstance(raw, RawText):
            from accel_core.config.yamlfile import looks_like  # PyYAML costs 30 ms

            raw = looks_like(raw)
        if cls and isinstance(raw, cls):
            if value.path in self.objects:
                self._refuse(value, f"a second object for section {dotted(value.path)}; give one")
            self.objects[value.path] = raw
            raw = said(raw)
        if raw is None:  # a section whose keys are all commented out
            return
        if not isinstance(raw, Mapping):
            self._refuse(value, f"is a section: expected keys and values, got {format_value(raw)}")
            return
        for key, inner in raw.items():
            origin = raw.origins[key] if isinstance(raw, LocatedDict) else value.origin
            yield SourceValue((*value.path, str(key)), inner, value.source, origin)

    def _read(self, value: SourceValue) -> None:
        """Read a value for an option of core, of a plugin, or of a named strategy."""
        name, *rest = value.path
        if name in CORE and name != "strategies":
            self._read_in((), RunConfig, value)
        elif name != "strategies":
            self._read_plugin(name, (name,), value)
        elif (plugin := self.aliases.get(rest[0])) is None or not plugin.value:
            self._refuse(value, "needs a key 'plugin' that names its strategy", value.path[:2])
        elif rest[1:] == ["plugin"]:
            self._merge(evolve(value, value=str(value.value)))
        else:
            self._read_plugin(plugin.value, value.path[:2], value)

    def _read_plugin(self, name: str, section: Path, value: SourceValue) -> None:
        cls = self.sections.class_of(name)
        if cls is not None:
            self._read_in(section, cls, value)
            return
        path = value.path[:1] if len(section) == 1 else value.path[:3]
        record, reason = self.sections.discovery.get(name), self.sections.reason_unread(name)
        if reason:
            self.notes[f"{dotted(path)} ({value.origin}) is kept unread: {reason}"] = None
        elif record and record.slot != "command":
            self._refuse(value, f"the plugin {name} has no options", path)
        elif len(section) == 1:
            self._refuse(value, f"unknown key{self.sections.hint(path, RunConfig)}", path)
        else:
            self._refuse(self.aliases[path[1]], not_installed(name, "strategy", self.sections.discovery))

    def _read_in(self, section: Path, cls: type, value: SourceValue) -> None:
        """Read a value for a section, given by path and class, or for an option in it."""
        if value.path == section:
            for part in self._split(value, cls):
                self._read_in(section, cls, part)
            return
        path = value.path[: len(section) + 1]
        attribute, kind = options_of(cls).get(path[-1], (None, None))
        inner = section_class(kind)
        if attribute is None:
            self._refuse(value, f"unknown key{self.sections.hint(path, cls)}", path)
        elif inner is not None:
            self._read_in(path, inner, value)
        elif value.path != path:
            self._refuse(value, f"has no keys of its own; give it whole, not {dotted(value.path)}", path)
        elif describe(attribute).python_only and value.source not in ("preset", "python", "proposal"):
            self._refuse(value, "can be given in Python only")
        else:
            self._read_option(value, attribute, kind)

    # -- single options ------------------------------------------------------------------------------

    def _read_option(self, value: SourceValue, attribute: Attribute[Any], kind: Any) -> None:
        path = ALIASES.get(value.path, value.path)
        if value.value is None and path != value.path:
            return  # unset, so that the first name counts
        raw = value.value
        try:
            if value.source in ("preset", "python") and callable(attribute.converter):
                raw = attribute.converter(raw)
            typed = convert_option(raw, attribute, kind)
        except (TypeError, ValueError) as error:
            self._refuse(value, str(error))
        else:
            secret = describe(attribute).secret or is_secret(path[-1])
            self._merge(evolve(value, value=typed, path=path), secret)

    def _merge(self, new: SourceValue, secret: bool = False) -> None:
        """Let the stronger source win; refuse a contradiction that must be a mistake.

        Python may not contradict a flag or a variable, and a proposal may not contradict any source. A
        source may not contradict itself either, by two names of one option for instance.
        """
        old = self.settings.setdefault(new.path, new)
        if old is new or old.value == new.value:
            if new.source != "proposal":
                self.settings[new.path] = new
            return
        ours, theirs = (repr(shown(value, secret)) for value in (new.value, old.value))
        if new.source == "proposal":
            self._refuse(new, f"wants {ours}, but it is {theirs} by {old.origin}")
        elif new.source == old.source != "preset" or (
            new.source == "python" and old.source not in ("preset", "file")
        ):
            self._refuse(new, f"{ours} here, but {theirs} by {old.origin}; give it once")
        else:
            origin = f"{new.origin} (over {theirs} from {old.origin})"
            self.settings[new.path] = evolve(new, origin=origin)
