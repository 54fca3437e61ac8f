"""What sources gave, read against the sections that exist: typed values with their origins, and problems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final

from attrs import Attribute, define, evolve, field

from accel_core.config.sources import Given, Problem, Text, show, spell
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Path, describe, is_secret, options_of, said, section_class
from accel_core.contract.suggest import did_you_mean
from accel_core.errors import ConfigError, PluginError
from accel_core.plugins import known
from accel_core.plugins.discovery import Discovery, Record, load

__all__ = ["ALIASES", "CORE", "Reader", "load_class"]

CORE: Final = {name: kind for name, (_, kind) in options_of(RunConfig).items() if name != "plugins"}
"""Core's own top-level options and sections: name -> type."""

ALIASES: Final[Mapping[Path, Path]] = {("accumulation", "num_steps"): ("gradient_accumulation_steps",)}
"""A second name of an option -> the first."""


@define
class Reader:
    """Knows which sections exist, and holds what was read. Mistakes are collected until `finish`."""

    discovery: Discovery
    settings: dict[Path, Given] = field(factory=dict)
    """Path of an option -> its typed value, from the strongest source."""
    objects: dict[Path, object] = field(factory=dict)
    """Path of a section -> the object that Python gave for it: a run holds that very object."""
    named: dict[str, str] = field(factory=dict)
    """Alias in `strategies` -> its plugin."""
    problems: list[Problem] = field(factory=list)
    notes: dict[str, None] = field(factory=dict)
    """Sections kept unread, and why. A dict, for the order."""
    _classes: dict[str, type | None] = field(factory=dict)
    _faults: dict[str, str] = field(factory=dict)
    _secrets: set[Path] = field(factory=set)
    _namers: dict[str, Given] = field(factory=dict)
    _within_of: tuple[int, dict[Path, list[Path]]] = field(default=(-1, {}))

    def read(self, givens: Iterable[Given]) -> None:
        """Read what sources gave, the weakest first."""
        opened = [each for given in givens for each in self._opened(given)]
        for given in opened:  # an alias's options are read by its plugin, whichever source named it
            if given.path[0] == "strategies" and given.path[2:] == ("plugin",):
                self.named[given.path[1]], self._namers[given.path[1]] = str(given.value), given
        for alias, plugin in self.named.items():
            other = self.discovery.get(alias)
            if alias == "auto" or (other and other.slot == "strategy" and alias != plugin):
                self.refuse(self._namers[alias], f"{alias!r} means another strategy; name yours otherwise")
        for given in opened:
            self._read(given)

    def finish(self) -> None:
        """Raise all problems there are as one ConfigError, in the order of the file."""
        if self.problems:
            lines = list(map(str, dict.fromkeys(sorted(self.problems, key=lambda it: it.position))))
            flags = any(problem.origin.startswith("flag ") for problem in self.problems)
            again = "launch --dry-run` with these flags" if flags else "config check`"
            message = "\n".join([*lines, f"correct this; `accel {again} looks again without training"])
            raise ConfigError(message, problems=lines)

    def refuse(self, given: Given, message: str, path: Path | None = None) -> None:
        """Add a problem with what a source gave."""
        self.problems.append(Problem(given.origin, given.path if path is None else path, message))

    def refuse_near_variables(self, environment: Iterable[str]) -> None:
        """Refuse ACCEL_MIXED_PRECISION and its kin; variables that name no option are left alone."""
        options: dict[str, str] = {}
        for name, kind in CORE.items():
            inner = section_class(kind)
            options |= (
                {f"{name}_{key}": f"{name}__{key}" for key in options_of(inner)} if inner else {name: name}
            )
        for name in sorted(environment):
            head, _, rest = name.upper().partition("_")
            if head == "ACCEL" and rest.lower() in options:
                meant = f"ACCEL__{options[rest.lower()].upper()}"
                self.problems.append(
                    Problem(f"variable {name}", (), f"is read by nobody; did you mean {meant}?")
                )

    def section(self, name: str) -> type | None:
        """The class of a section; None if there is none, or it cannot be read."""
        if name in CORE:
            return section_class(CORE[name])
        if name not in self._classes:
            record, self._classes[name] = self.discovery.get(name), None
            try:  # who chooses a plugin gets its error, whose section it is a note
                self._classes[name] = load_class(record) if record else None
            except PluginError as error:
                self._faults[name] = str(error.__cause__ or error).partition("\n")[0]
        return self._classes[name]

    def sections(self) -> Iterator[tuple[str, type]]:
        """All sections and their classes, core's first."""
        for name in (*CORE, *(record.name for record in self.discovery.records)):
            if (cls := self.section(name)) is not None:
                yield name, cls

    def within(self, path: Path) -> Sequence[Path]:
        """The options and objects given for a section or for anything in it."""
        given = len(self.settings) + len(self.objects)
        if self._within_of[0] != given:  # indexed once: a look at all of them for each section is quadratic
            held: dict[Path, list[Path]] = {}
            mirrors = [alias for alias, path in ALIASES.items() if path in self.settings]
            for place in (*self.settings, *self.objects, *mirrors):
                for depth in range(len(place) + 1):
                    held.setdefault(place[:depth], []).append(place)
            self._within_of = (given, held)
        return self._within_of[1].get(path, ())

    # -- the walk down to single options -------------------------------------------------------------

    def _opened(self, given: Given) -> Iterator[Given]:
        """Objects by their section, `strategies` by option, plugins by their true name."""
        path = given.path
        if not path:
            yield from self._object(given)
        elif path[0] != "strategies":  # variables and flags cannot spell hyphens
            spelt = {record.name.replace("-", "_"): record.name for record in self.discovery.records}
            yield evolve(given, path=(spelt.get(path[0], path[0]), *path[1:]))
        elif len(path) > 2:
            yield given
        else:
            home = self._home(given.value) if len(path) == 2 else None
            entries = [given.under("plugin", home)] if home else []
            entries += self._entries(given, self.section(home or ""))
            yield from (option for each in entries for option in self._opened(each))
            if len(path) == 2 and not entries:
                yield given

    def _object(self, given: Given) -> Iterator[Given]:
        home = self._home(given.value)
        if home is not None:
            yield evolve(given, path=(home,))
        else:
            names = ", ".join(sorted(cls.__name__ for _, cls in self.sections()))
            self.refuse(given, f"configures nothing that is installed; what can be given: {names}")

    def _home(self, item: object) -> str | None:
        """The section whose class the object is of, the closest class first."""
        for names in (CORE, (record.name for record in self.discovery.records)):
            homes = {self.section(name): name for name in names}
            found = next((homes[cls] for cls in type(item).__mro__ if cls in homes), None)
            if found:
                return found
        return None

    def _entries(self, given: Given, cls: type | None) -> list[Given]:
        """What is given for the keys of a section; of an object, what it speaks of."""
        raw = given.value
        if isinstance(raw, Text):
            from accel_core.config.yamlfile import looks_like  # PyYAML costs 30 ms

            raw = looks_like(raw)
        if cls and isinstance(raw, cls):
            if given.path in self.objects:
                self.refuse(given, f"a second object for section {spell(given.path)}; give one")
            self.objects[given.path] = raw
            raw = said(raw)
        if raw is None:  # a section whose keys are all commented out
            return []
        if not isinstance(raw, Mapping):
            self.refuse(given, f"is a section: expected keys and values, got {show(raw)}")
            return []
        return [given.under(str(key), value) for key, value in raw.items()]

    def _read(self, given: Given) -> None:
        name, depth = given.path[0], 1
        if name == "strategies":
            name, depth = self.named.get(given.path[1], ""), 2
        if depth == 2 and not name:
            self.refuse(given, "needs a key 'plugin' that names its strategy", given.path[:2])
        elif depth == 2 and given.path[2:] == ("plugin",):
            self._merge(evolve(given, value=str(given.value)))
        elif depth == 1 and name in CORE:
            self._within(given, 0, RunConfig)
        elif (cls := self.section(name)) is not None:
            self._within(given, depth, cls)
        else:
            self._unread(given, given.path[: 2 * depth - 1], name)

    def _within(self, given: Given, depth: int, cls: type) -> None:
        """Read what is given for a section, which is `depth` names deep, or for something in it."""
        if len(given.path) == depth:
            for each in self._entries(given, cls):
                self._within(each, depth, cls)
            return
        place = given.path[: depth + 1]
        attribute, kind = options_of(cls).get(place[-1], (None, None))
        inner = section_class(kind)
        if attribute is None:
            self.refuse(given, f"unknown key{self._hint(place, cls)}", place)
        elif inner is not None:
            self._within(given, depth + 1, inner)
        elif len(given.path) > len(place):
            self.refuse(given, f"has no keys of its own; give it whole, not {spell(given.path)}", place)
        elif describe(attribute).python_only and given.source not in ("preset", "python", "proposal"):
            self.refuse(given, "can be given in Python only")
        else:
            self._option(given, attribute, kind)

    def _option(self, given: Given, attribute: Attribute[Any], kind: Any) -> None:
        from accel_core.config.structure import convert

        value, path = given.value, ALIASES.get(given.path, given.path)
        if value is None and path != given.path:
            return  # unset, so that the other name says it
        if value is False and _value(attribute.default) == "no":
            value = "no"  # as YAML reads the bare word
        try:
            if given.source in ("preset", "python") and callable(attribute.converter):
                value = attribute.converter(value)
            value = convert(value, kind)
            objection = describe(attribute).objection(value)
        except (TypeError, ValueError) as mismatch:  # a converter's too, of a wrong type
            objection = str(mismatch)
        if describe(attribute).secret:
            self._secrets.add(path)
        if objection:
            self.refuse(given, objection)
        else:
            self._merge(evolve(given, value=value, path=path))

    def _merge(self, given: Given) -> None:
        """Lay it over what was there; but Python contradicts no flag or variable, a proposal nobody.

        Nor does a source contradict itself, by two names of one option for instance.
        """
        before = self.settings.setdefault(given.path, given)
        if before is given or before.value == given.value:
            if given.source != "proposal":
                self.settings[given.path] = given
            return
        from accel_core.config.structure import shown

        secret = given.path in self._secrets or is_secret(given.path[-1])
        mine, theirs = (repr(shown(each.value, secret)) for each in (given, before))
        if given.source == "proposal":
            self.refuse(given, f"wants {mine}, but it is {theirs} by {before.origin}")
        elif given.source == before.source != "preset" or (
            given.source == "python" and before.source not in ("preset", "file")
        ):
            self.refuse(given, f"{mine} here, but {theirs} by {before.origin}; give it once")
        else:
            self.settings[given.path] = evolve(
                given, origin=f"{given.origin} (over {theirs} from {before.origin})"
            )

    # -- names nobody can read -----------------------------------------------------------------------

    def _unread(self, given: Given, place: Path, name: str) -> None:
        """A section or key for a plugin whose options cannot be read: a note where that may be right."""
        record, missing = self.discovery.get(name), known.known_plugin(name)
        reason = self._faults.get(name)
        if missing and not record:
            reason = f"{missing.slot} {name} is not installed; {known.install_hint(missing.folder)}"
        if reason:
            self.notes[f"{spell(place)} ({given.origin}) is kept unread: {reason}"] = None
        elif record and record.slot != "command":
            self.refuse(given, f"the plugin {name} has no options", place)
        elif len(place) > 1:
            namer = self._namers[place[1]]
            self.refuse(namer, known.absence(name, "strategy", self.discovery), namer.path)
        else:
            self.refuse(given, f"unknown key{self._hint(place, RunConfig)}", place)

    def _hint(self, place: Path, cls: type) -> str:
        """The option or section that was probably meant: a near name, or the same in another section."""
        *section, name = place
        mine = list(options_of(cls))
        if cls is RunConfig:
            plugins = [record.name for record in self.discovery.records if record.slot != "command"]
            mine = [*CORE, *plugins, *(plugin.name for plugin in known.known_plugins())]
        owners = ["the top level"] if name in CORE else []
        owners += [other for other, cls in self.sections() if name in options_of(cls) and [other] != section]
        for it in known.known_plugins():
            if name in it.keys and self.discovery.get(it.name) is None:
                owners.append(f"{it.name} (not installed; {known.install_hint(it.folder)})")
        close = did_you_mean(name, mine)
        return f"; it is an option of {' and '.join(owners)}" if owners and not close else close


def _value(default: Any) -> Any:
    return default.value if isinstance(default, Enum) else default


def load_class(record: Record) -> type | None:
    """The config class that a plugin's card names.

    Raises:
        PluginError: the plugin is broken, or the class cannot be imported, or is not made of options.
    """
    if record.fault:
        about = f"the plugin is {record.fault}: {record.detail}"
        raise PluginError(f"{about}\n`accel plugins doctor {record.name}` looks closer", plugin=record.name)
    if record.card is None or record.card.config is None:
        return None
    cls: type = load(record, record.card.config)
    try:
        _refuse_unwritable(cls)
    except Exception as error:  # NameError, TypeError, NotAnAttrsClassError: annotations are code
        about = f"{record.slot} plugin {record.name!r} ({record.origin}): {record.card.config}"
        raise PluginError(
            f"{about} cannot be read as options\n"
            f"{type(error).__name__}: {error}\n"
            "make it an attrs class, and option(python_only=True) what only Python can hold or import",
            plugin=record.name,
            distribution=record.origin,
        ) from error
    return cls


def _refuse_unwritable(cls: type, section: str = "") -> None:
    """Refuse options whose type neither a file nor a shell can hold, which no user could set."""
    from accel_core.config.structure import writable

    for name, (attribute, kind) in options_of(cls).items():
        if not describe(attribute).python_only and not writable(kind):
            raise TypeError(f"no file, variable or flag can hold option {section}{name}: {attribute.type}")
        if inner := section_class(kind):
            _refuse_unwritable(inner, f"{section}{name}.")
