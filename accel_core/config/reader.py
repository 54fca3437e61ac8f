"""Layers of raw values into typed settings, each with its origin; mistakes are collected, not raised.

A layer is what one source gave: a file, the environment, flags, Python. A setting is one option's
typed value. Both are addressed by paths, tuples of names such as ("launch", "nodes").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from attrs import define, evolve, field, frozen

from accel_core import known
from accel_core.config.options import describe
from accel_core.config.schema import RunConfig
from accel_core.config.structure import (
    MismatchError,
    Path,
    Text,
    convert,
    options_of,
    plain,
    section_class,
    show,
)
from accel_core.errors import PluginError
from accel_core.plugins import Discovery, Record, load, near

__all__ = [
    "CORE",
    "Layer",
    "Problem",
    "Reader",
    "Setting",
    "Source",
    "load_class",
    "mapping_in",
    "merge",
    "spell",
]

Source = Literal["file", "environment", "flag", "python", "proposal"]

CORE: Final = {name: kind for name, (_, kind) in options_of(RunConfig).items() if name != "plugins"}
"""Core's own top-level options and sections: name -> type."""


@frozen
class Setting:
    """A typed value, who gave it, and what it won over."""

    value: Any
    source: Source
    origin: str
    over: str = ""

    @property
    def described(self) -> str:
        """The origin, and what it won over."""
        return f"{self.origin} (over {self.over})" if self.over else self.origin


@frozen
class Problem:
    """One mistake: where, which option, what is wrong."""

    origin: str
    path: Path
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, spell(self.path), self.message) if part)


@frozen
class Layer:
    """What one source gave: (path, raw value) pairs; a value may be a whole section."""

    source: Source
    entries: Sequence[tuple[Path, Any]]
    origin: Callable[[Path], str]


def spell(path: Path) -> str:
    """A path as people write it."""
    return ".".join(path)


@define
class Reader:
    """Knows which sections exist, and reads layers against them."""

    discovery: Discovery
    named: dict[str, str] = field(factory=dict)
    """Alias in `strategies` -> its plugin."""
    problems: list[Problem] = field(factory=list)
    notes: dict[str, None] = field(factory=dict)
    """Sections kept unread, and why. A dict, for the order."""
    _classes: dict[str, type | None] = field(factory=dict)

    def read(self, layer: Layer) -> dict[Path, Setting]:
        """The layer's settings; what is wrong with it is added to `problems`."""
        return {
            path: setting for place, raw in layer.entries for path, setting in self._top(layer, place, raw)
        }

    def options_class(self, name: str) -> type | None:
        """The config class of an installed plugin; None if it has no options or cannot be read."""
        if name not in self._classes:
            record = self.discovery.get(name)
            try:
                self._classes[name] = load_class(record) if record and not record.fault else None
            except PluginError:  # who chooses the plugin gets the error, whose section it is a note
                self._classes[name] = None
        return self._classes[name]

    # -- the walk: each step yields (path, setting) pairs or adds a problem ---------------------------

    def _top(self, layer: Layer, place: Path, raw: Any) -> Iterator[tuple[Path, Setting]]:
        name = self._section_name(place[0], layer.source)
        place = (name, *place[1:])
        if name == "strategies":
            yield from self._strategies(layer, place[:1], self._nest(place[1:], raw))
        elif name in CORE:
            yield from self._option(layer, place[:1], RunConfig, self._nest(place[1:], raw))
        elif (cls := self.options_class(name)) is not None:
            yield from self._section(layer, place[:1], cls, self._nest(place[1:], raw))
        else:
            self._optionless(layer, place[:1], name)

    def _section_name(self, given: str, source: Source) -> str:
        if source == "file":
            return given
        names = [record.name for record in self.discovery.records]
        return next((name for name in names if name.replace("-", "_") == given), given)

    def _nest(self, rest: Path, raw: Any) -> Any:
        for name in reversed(rest):
            raw = _Nested({name: raw})
        return raw

    def _strategies(self, layer: Layer, path: Path, raw: Any) -> Iterator[tuple[Path, Setting]]:
        for alias, options in self._entries(layer, path, raw):
            place = (*path, alias)
            plugin = self.named.get(alias)
            if plugin is None:
                self._problem(layer, place, "needs a key 'plugin' that names its strategy")
                continue
            cls = self.options_class(plugin)
            for key, value in self._entries(layer, place, options):
                if key == "plugin":
                    yield (*place, key), Setting(plugin, layer.source, layer.origin((*place, key)))
                elif cls is not None:
                    yield from self._option(layer, (*place, key), cls, value)
                else:
                    self._optionless(layer, (*place, key), plugin)

    def _section(self, layer: Layer, path: Path, cls: type, raw: Any) -> Iterator[tuple[Path, Setting]]:
        for key, value in self._entries(layer, path, raw):
            yield from self._option(layer, (*path, key), cls, value)

    def _entries(self, layer: Layer, path: Path, raw: Any) -> list[tuple[str, Any]]:
        if isinstance(raw, Text):
            raw = mapping_in(raw)
        if raw is None:  # a section whose keys are all commented out
            return []
        if not isinstance(raw, Mapping):
            self._problem(layer, path, f"is a section: expected keys and values, got {show(raw)}")
            return []
        return [(str(key), value) for key, value in raw.items()]

    def _option(self, layer: Layer, path: Path, cls: type, raw: Any) -> Iterator[tuple[Path, Setting]]:
        if path[-1] not in options_of(cls):
            self._problem(layer, path, f"unknown key{self._hint(path, cls)}")
            return
        attribute, kind = options_of(cls)[path[-1]]
        inner = section_class(kind)
        if inner and not isinstance(raw, inner):
            yield from self._section(layer, path, inner, raw)
            return
        about = describe(attribute)
        if about.python_only and layer.source not in ("python", "proposal"):
            self._problem(layer, path, "can be given in Python only")
            return
        if isinstance(raw, _Nested):
            self._problem(layer, path, f"has no keys of its own; give it whole, not {spell((*path, *raw))}")
            return
        try:
            if layer.source == "python" and callable(attribute.converter):
                raw = attribute.converter(raw)
            value = convert(raw, kind)
        except (MismatchError, TypeError, ValueError) as mismatch:  # a converter's, of a wrong type
            self._problem(layer, path, str(mismatch))
            return
        objection = about.objection(value)
        if objection:
            self._problem(layer, path, objection)
        else:
            yield path, Setting(value, layer.source, layer.origin(path))

    def _problem(self, layer: Layer, path: Path, message: str) -> None:
        self.problems.append(Problem(layer.origin(path), path, message))

    # -- names nobody can read -----------------------------------------------------------------------

    def _optionless(self, layer: Layer, path: Path, name: str) -> None:
        """A section or key for a plugin whose options cannot be read: a note where that may be right."""
        record = self.discovery.get(name)
        if record is not None and record.slot != "command":
            reason = f"the plugin is {record.fault}: {record.detail}" if record.fault else _failure(record)
            problem = f"the plugin {name} has no options"
        elif (missing := known.known_plugin(name)) is not None:
            reason = f"{missing.slot} {name} is not installed; pip install {missing.distribution}"
        else:
            reason, problem = "", f"unknown key{self._hint(path, RunConfig)}"
            if path[0] == "strategies":
                problem = known.absence(name, "strategy", self.discovery)
        if reason:
            self.notes[f"{spell(path)} ({layer.origin(path)}) is kept unread: {reason}"] = None
        else:
            self._problem(layer, path, problem)

    def _hint(self, path: Path, cls: type) -> str:
        name = path[-1]
        owners = [owner for owner in self._owners(name) if owner != spell(path[:-1])]
        mine: list[str] = list(options_of(cls))
        if cls is RunConfig:
            mine = [
                *CORE,
                *(r.name for r in self.discovery.records if r.slot != "command"),
                *(it.name for it in known.known_plugins()),
            ]
        if near(name, mine) or not owners:
            return near(name, mine)
        return f"; it is an option of {' and '.join(owners)}"

    def _owners(self, name: str) -> Iterator[str]:
        """The other sections that have an option of that name, the missing ones with their remedy."""
        if name in CORE:
            yield "the top level"
        for section, kind in CORE.items():
            cls = section_class(kind)
            if cls and name in options_of(cls):
                yield section
        for record in self.discovery.records:
            cls = self.options_class(record.name)
            if cls and name in options_of(cls):
                yield record.name
        for it in known.known_plugins():
            if name in it.keys and self.discovery.get(it.name) is None:
                yield f"{it.name} (not installed: pip install {it.distribution})"


def load_class(record: Record) -> type | None:
    """The config class that a plugin's card names.

    Raises:
        PluginError: it cannot be imported, or is not made of options.
    """
    if record.card is None or record.card.config is None:
        return None
    cls: type = load(record, record.card.config)
    try:
        options_of(cls)
    except Exception as error:  # NameError, TypeError, NotAnAttrsClassError: annotations are code
        raise PluginError(
            f"{record.slot} plugin {record.name!r} ({record.origin}): {record.card.config} has no options\n"
            f"{type(error).__name__}: {error}\n"
            "it must be an attrs class; annotations are resolved, so what only type checkers import needs"
            " option(python_only=True)",
            plugin=record.name,
            distribution=record.origin,
        ) from error
    return cls


def _failure(record: Record) -> str:
    """Why a plugin's config class cannot be loaded; empty if it has none."""
    try:
        load_class(record)
    except PluginError as error:
        return str(error.__cause__)
    return ""


class _Nested(dict[str, Any]):
    """A mapping that was spelt as a dotted path: only sections may be entered that way."""


def mapping_in(text: str) -> Any:
    """What a shell wrote for a whole section: `{nodes: 2}`."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def merge(into: dict[Path, Setting], settings: Mapping[Path, Setting], problems: list[Problem]) -> None:
    """Lay one layer's settings over those before; Python may not contradict flag or environment."""
    for path, setting in settings.items():
        before = into.get(path)
        if before is None or before.value == setting.value:
            into[path] = setting
        elif setting.source == "python" and before.source != "file":
            message = (
                f"{plain(setting.value)!r} here, but {plain(before.value)!r} by {before.origin}; give it once"
            )
            problems.append(Problem(setting.origin, path, message))
        else:
            into[path] = evolve(setting, over=f"{plain(before.value)!r} from {before.origin}")
