"""What sources gave, read against the sections that exist: settings, each with its origin, and problems.

A setting is one option's typed value. Mistakes are collected, not raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from attrs import Attribute, define, evolve, field, frozen

from accel_core import known
from accel_core.config.options import Path, default_of, describe, options_of, section_class
from accel_core.config.problems import Problem, show, spell
from accel_core.config.schema import RunConfig
from accel_core.config.sources import Given, Source, Text
from accel_core.errors import PluginError
from accel_core.plugins import Discovery, Record, load, near

__all__ = ["CORE", "Reader", "Setting", "load_class"]

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


@define
class Reader:
    """Knows which sections exist, and holds what was read."""

    discovery: Discovery
    settings: dict[Path, Setting] = field(factory=dict)
    objects: dict[Path, object] = field(factory=dict)
    """Section -> the object that Python gave for it, so that a run holds the very object."""
    named: dict[str, str] = field(factory=dict)
    """Alias in `strategies` -> its plugin."""
    problems: list[Problem] = field(factory=list)
    notes: dict[str, None] = field(factory=dict)
    """Sections kept unread, and why. A dict, for the order."""
    _classes: dict[str, type | None] = field(factory=dict)
    _faults: dict[str, str] = field(factory=dict)

    def read(self, givens: Iterable[Given]) -> None:
        """Read what sources gave, the weakest first."""
        aliases: dict[str, Given] = {}
        opened = [each for given in givens for each in self._opened(given, aliases)]
        # An alias's options are read by its plugin, whichever source named it.
        self.named |= {g.path[1]: str(g.raw) for g in opened if g.path[::2] == ("strategies", "plugin")}
        for alias, given in aliases.items():
            if alias not in self.named:
                self._problem(given, "needs a key 'plugin' that names its strategy", ("strategies", alias))
        for given in opened:
            for path, setting in self._settings(given):
                self._merge(path, setting)

    def add(self, item: object) -> Given | None:
        """A config object from Python as what it gives; its class tells for which section."""
        section = self._home(item)
        if section is not None:
            return Given((section,), item, "python", f"{type(item).__name__}(...)")
        names = ", ".join(sorted(cls.__name__ for _, cls in self.sections()))
        message = f"configures nothing that is installed; what can be given: {names}"
        self.problems.append(Problem(f"Accelerator({type(item).__name__})", (), message))
        return None

    def section(self, name: str) -> type | None:
        """The class of a section; None if there is none, or it cannot be read."""
        if name in CORE:
            return section_class(CORE[name])
        if name not in self._classes:
            record, self._classes[name] = self.discovery.get(name), None
            try:  # who chooses a plugin gets its error, whose section it is a note
                if record and record.fault:
                    self._faults[name] = f"the plugin is {record.fault}: {record.detail}"
                elif record:
                    self._classes[name] = load_class(record)
            except PluginError as error:
                self._faults[name] = str(error.__cause__)
        return self._classes[name]

    def sections(self) -> Iterator[tuple[str, type]]:
        """All sections and their classes, core's first."""
        for name in (*CORE, *(record.name for record in self.discovery.records)):
            if (cls := self.section(name)) is not None:
                yield name, cls

    def touches(self, section: Path) -> bool:
        """Whether anybody gave anything within it."""
        return any(path[: len(section)] == section for path in (*self.settings, *self.objects))

    # -- the walk down to single options -------------------------------------------------------------

    def _opened(self, given: Given, aliases: dict[str, Given]) -> Iterator[Given]:
        """Files and `strategies` taken apart; plugins by their names, which variables cannot spell."""
        path = given.path
        if path and path[0] != "strategies":
            spelt = {record.name.replace("-", "_"): record.name for record in self.discovery.records}
            yield evolve(given, path=(spelt.get(path[0], path[0]), *path[1:]))
            return
        if len(path) > 1:
            aliases.setdefault(path[1], given)
        if len(path) > 2:
            yield given
            return
        home = self._home(given.raw) if path else None
        if home:
            yield given.under("plugin", home)
        for each in self._entries(given, self.section(home or "")):
            yield from self._opened(each, aliases)

    def _entries(self, given: Given, cls: type | None) -> list[Given]:
        """What is given for the keys of a section; of an object, what differs from the defaults."""
        raw = given.raw
        if isinstance(raw, Text):
            raw = raw.looks_like()
        if cls and isinstance(raw, cls):
            raw = self._changed(given)
        if raw is None:  # a section whose keys are all commented out
            return []
        if not isinstance(raw, Mapping):
            self._problem(given, f"is a section: expected keys and values, got {show(raw)}")
            return []
        return [given.under(str(key), value) for key, value in raw.items()]

    def _changed(self, given: Given) -> dict[str, Any]:
        item = given.raw
        if given.path in self.objects:
            self.problems.append(
                Problem(
                    f"Accelerator({type(item).__name__})",
                    (),
                    f"a second object for section {spell(given.path)}; give one",
                )
            )
            return {}
        self.objects[given.path] = item
        options = options_of(type(item)).items()
        held = {alias: getattr(item, attribute.name) for alias, (attribute, _) in options}
        return {alias: held[alias] for alias, (a, _) in options if held[alias] != default_of(a, item)}

    def _settings(self, given: Given) -> Iterator[tuple[Path, Setting]]:
        path = given.path
        name, depth = path[0], 1
        if name == "strategies":
            name, depth = self.named.get(path[1], ""), 2
            if path[2:] == ("plugin",):
                yield path, Setting(str(given.raw), given.source, given.origin)
                return
        if path[0] in CORE and depth == 1:
            yield from self._within(given, 0, RunConfig)
        elif (cls := self.section(name)) is not None:
            yield from self._within(given, depth, cls)
        elif name:  # else an alias without plugin, which is a problem already
            self._unread(given, path[: 2 * depth - 1], name)

    def _within(self, given: Given, depth: int, cls: type) -> Iterator[tuple[Path, Setting]]:
        """The settings in what is given for a section, which is `depth` names deep, or for a part of it."""
        if len(given.path) == depth:
            for each in self._entries(given, cls):
                yield from self._within(each, depth, cls)
            return
        place = given.path[: depth + 1]
        attribute, kind = options_of(cls).get(place[-1], (None, None))
        inner = section_class(kind)
        if attribute is None:
            self._problem(given, f"unknown key{self._hint(place, cls)}", place)
        elif inner is not None:
            yield from self._within(given, depth + 1, inner)
        elif len(given.path) > len(place):
            self._problem(given, f"has no keys of its own; give it whole, not {spell(given.path)}", place)
        else:
            yield from self._option(given, attribute, kind)

    def _option(self, given: Given, attribute: Attribute[Any], kind: Any) -> Iterator[tuple[Path, Setting]]:
        from accel_core.config.structure import convert

        about, value = describe(attribute), given.raw
        if about.python_only and given.source not in ("python", "proposal"):
            self._problem(given, "can be given in Python only")
            return
        try:
            if given.source == "python" and callable(attribute.converter):
                value = attribute.converter(value)
            value = convert(value, kind)
        except (TypeError, ValueError) as mismatch:  # a converter's too, of a wrong type
            self._problem(given, str(mismatch))
            return
        objection = about.objection(value)
        if objection:
            self._problem(given, objection)
        else:
            yield given.path, Setting(value, given.source, given.origin)

    def _merge(self, path: Path, setting: Setting) -> None:
        """Over what was there, but that Python contradicts no flag or variable, and a proposal nobody."""
        from accel_core.config.structure import plain

        before = self.settings.get(path)
        if before is None or (before.value == setting.value and setting.source != "proposal"):
            self.settings[path] = setting
        elif before.value == setting.value:
            return
        elif setting.source == "proposal":
            message = f"wants {plain(setting.value)!r}, but it is {plain(before.value)!r} by {before.origin}"
            self.problems.append(Problem(setting.origin, path, message))
        elif setting.source == "python" and before.source != "file":
            here, there = plain(setting.value), plain(before.value)
            message = f"{here!r} here, but {there!r} by {before.origin}; give it once"
            self.problems.append(Problem(setting.origin, path, message))
        else:
            self.settings[path] = evolve(setting, over=f"{plain(before.value)!r} from {before.origin}")

    def _problem(self, given: Given, message: str, path: Path | None = None) -> None:
        self.problems.append(Problem(given.origin, path or given.path, message))

    # -- names nobody can read -----------------------------------------------------------------------

    def _home(self, item: object) -> str | None:
        """The section whose class the object is of, the closest class first."""
        for names in (CORE, (record.name for record in self.discovery.records)):
            homes = {self.section(name): name for name in names}
            found = next((homes[cls] for cls in type(item).__mro__ if cls in homes), None)
            if found:
                return found
        return None

    def _unread(self, given: Given, place: Path, name: str) -> None:
        """A section or key for a plugin whose options cannot be read: a note where that may be right."""
        record, missing = self.discovery.get(name), known.known_plugin(name)
        reason = self._faults.get(name)
        if record is not None and record.slot != "command":
            problem = f"the plugin {name} has no options"
        elif missing is not None:
            reason = f"{missing.slot} {name} is not installed; pip install {missing.distribution}"
        elif len(place) > 1:
            problem = known.absence(name, "strategy", self.discovery)
        else:
            problem = f"unknown key{self._hint(place, RunConfig)}"
        if reason:
            self.notes[f"{spell(place)} ({given.origin}) is kept unread: {reason}"] = None
        else:
            self._problem(given, problem, place)

    def _hint(self, place: Path, cls: type) -> str:
        """The option or section that was probably meant: a near name, or the same in another section."""
        mine: list[str] = list(options_of(cls))
        if cls is RunConfig:
            plugins = [record.name for record in self.discovery.records if record.slot != "command"]
            mine = [*CORE, *plugins, *(plugin.name for plugin in known.known_plugins())]
        close = near(place[-1], mine)
        owners = [] if close else [it for it in self._owners(place[-1]) if it != spell(place[:-1])]
        return f"; it is an option of {' and '.join(owners)}" if owners else close

    def _owners(self, name: str) -> Iterator[str]:
        """The sections that have an option of that name, the missing ones with their remedy."""
        if name in CORE:
            yield "the top level"
        yield from (section for section, cls in self.sections() if name in options_of(cls))
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
