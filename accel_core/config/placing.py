"""Pass 2 of a config, first: the option that each value is for.

A source may give a single option, a section whole, or a config object. Each becomes values of single
options with their declarations, still as they were given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from attrs import Attribute, define, field

from accel_core.config.convert import convert_option, format_value, read_text
from accel_core.config.sections import CORE, Sections
from accel_core.config.sources import ConfigProblem, LocatedDict, RawText, SourceValue, dotted
from accel_core.config.unplaced import Unplaced
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Path, describe, options_of, said, section_class


class PlacedValue(NamedTuple):
    """A value for one option, with the option's declaration."""

    value: SourceValue
    attribute: Attribute[Any]
    kind: Any

    def convert(self) -> Any:
        """Return the value in the type of its option, or raise ValueError."""
        raw, is_python = self.value.value, self.value.source in ("preset", "python", "proposal")
        if describe(self.attribute).python_only and not is_python:
            raise ValueError("can be given in Python only")
        if self.value.source in ("preset", "python") and callable(self.attribute.converter):
            raw = self.attribute.converter(raw)
        return convert_option(raw, self.attribute, self.kind)


@define(eq=False, repr=False)
class Placement:
    """The values of all sources by option, and the mistakes in where they were given."""

    sections: Sections
    options: list[PlacedValue] = field(factory=list)
    """In the order of the sources, the weakest first."""
    objects: dict[Path, object] = field(factory=dict)
    """Path of a section -> the object that Python gave; a run holds that very object."""
    aliases: dict[str, SourceValue] = field(factory=dict)
    """Alias in `strategies` -> the name of its plugin."""
    classes: dict[Path, type | None] = field(factory=dict)
    """Path of each section of a plugin or a named strategy -> its class, if any."""
    unplaced: list[Unplaced] = field(factory=list)
    problems: list[ConfigProblem] = field(factory=list)
    notes: dict[str, None] = field(factory=dict)
    """Settings that were left unread, and why. A dict, for the order."""

    def place(self, values: Iterable[SourceValue]) -> None:
        """Find the options of values, the weakest source first."""
        located = [part for value in values for part in self._locate(value)]
        for value in located:  # before any option is placed: another source may name the plugin of an alias
            if value.path[0] == "strategies" and value.path[2:] == ("plugin",):
                name = str(value.value) if isinstance(value.value, str) else ""  # refused below
                self.aliases[value.path[1]] = value._replace(value=name)
        for alias, plugin in self.aliases.items():
            self.classes["strategies", alias] = self.sections.class_of(plugin.value)
            other = self.sections.discovery.get(alias)
            if alias == "auto" or (other and other.slot == "strategy" and alias != plugin.value):
                self._refuse(plugin, f"{alias!r} means another strategy; name yours otherwise")
        for value in located:
            self._place(value)
        self.report(unplaced.explain(self.sections) for unplaced in self.unplaced)

    def report(self, found: Iterable[ConfigProblem | str]) -> None:
        """Keep mistakes, and sentences as notes."""
        for reason in found:
            if isinstance(reason, str):
                self.notes[reason] = None
            else:
                self.problems.append(reason)

    def _refuse(self, value: SourceValue, message: str, path: Path | None = None) -> None:
        self.problems.append(ConfigProblem(value.origin, value.path if path is None else path, message))

    def _locate(self, value: SourceValue) -> Iterator[SourceValue]:
        """Put the value under its section's true name; split `strategies` into options."""
        path, section = value.path, value.path[0] if value.path else ""
        is_strategy = section == "strategies"
        can_be_object = not path or (is_strategy and len(path) == 2)
        name = self.sections.configured_by(value.value) if can_be_object else None
        if name and not path:
            section, path = name, (name,)
        if section and not is_strategy:
            section = self.sections.spell(section)
            self.classes[(section,)] = None if section in CORE else self.sections.class_of(section)
            yield value._replace(path=(section, *path[1:]))
        elif len(path) > 2:
            yield value
        elif is_strategy:
            parts = list(self._split(value, self.sections.class_of(name) if name else None))
            if name:
                parts.insert(0, value._replace(path=(*path, "plugin"), value=name))
            for part in parts:
                yield from self._locate(part)
            if len(path) == 2 and not parts:
                yield value
        elif path:  # a key without a letter
            self._refuse(value, "names no option; `accel config show` lists them")
        elif isinstance(value.value, type):
            self._refuse(value, f"is a class; give an object of it: {value.value.__name__}()")
        else:
            classes = ", ".join(sorted(cls.__name__ for _, cls in self.sections.all()))
            self._refuse(value, f"configures nothing that is installed; what can be given: {classes}")

    def _split(self, value: SourceValue, cls: type | None) -> Iterator[SourceValue]:
        """Yield the values of a section's keys; of an object, its given arguments."""
        raw = value.value
        if isinstance(raw, RawText):
            raw = read_text(raw)
        if cls and isinstance(raw, cls):
            given, raw = raw, said(raw)
            if value.path in self.objects:
                self._refuse(value, f"a second object for section {dotted(value.path)}; give one")
            self.objects[value.path] = given
        if raw is None:  # a section whose keys are all commented out
            return
        if not isinstance(raw, Mapping):
            self._refuse(value, f"is a section: expected keys and values, got {format_value(raw)}")
            return
        for key, inner in raw.items():
            origin = raw.origins[key] if isinstance(raw, LocatedDict) else value.origin
            yield SourceValue((*value.path, str(key)), inner, value.source, origin)

    def _place(self, value: SourceValue) -> None:
        """Place a value for an option of core, of a plugin, or of a named strategy."""
        name, *rest = value.path
        if name in CORE and name != "strategies":
            self._place_in((), RunConfig, value)
        elif name != "strategies":
            self._place_in_plugin(value._replace(value=name), (name,), value)
        elif (plugin := self.aliases.get(rest[0])) is None or not plugin.value:
            self._refuse(value, "needs a key 'plugin' that names its strategy", value.path[:2])
        elif rest[1:] == ["plugin"]:
            named = value._replace(value=str(value.value))
            self.options.append(PlacedValue(named, *options_of(RunConfig)["strategy"]))
        else:
            self._place_in_plugin(plugin, value.path[:2], value)

    def _place_in_plugin(self, plugin: SourceValue, section: Path, value: SourceValue) -> None:
        if (cls := self.classes[section]) is not None:
            self._place_in(section, cls, value)
        else:
            path = value.path[:1] if len(section) == 1 else value.path[:3]
            self.unplaced.append(Unplaced(value, path, None, plugin))

    def _place_in(self, section: Path, cls: type, value: SourceValue) -> None:
        """Place a value for a section, given by path and class, or for an option in it."""
        if value.path == section:
            for part in self._split(value, cls):
                self._place_in(section, cls, part)
            return
        path = value.path[: len(section) + 1]
        attribute, kind = options_of(cls).get(path[-1], (None, None))
        if attribute is None:
            self.unplaced.append(Unplaced(value, path, cls, value))
        elif (inner := section_class(kind)) is not None:
            self._place_in(path, inner, value)
        elif value.path != path:
            self._refuse(value, f"has no keys of its own; give it whole, not {dotted(value.path)}", path)
        else:
            self.options.append(PlacedValue(value, attribute, kind))
