"""One config out of all sources: defaults < file < environment < flags < Python < proposals.

Each value keeps its origin, and all mistakes are reported at once. What Python says may not
contradict a flag or the environment; what a plugin proposes may not contradict anybody.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Final

from attrs import NOTHING, evolve, field, frozen

from accel_core.config.layers import environment_layer, flag_layer, python_layers
from accel_core.config.reader import (
    CORE,
    Layer,
    Problem,
    Reader,
    Setting,
    Source,
    load_class,
    mapping_in,
    merge,
    spell,
)
from accel_core.config.schema import Proposal, RunConfig
from accel_core.config.structure import Path, Text, options_of, plain, section_class
from accel_core.errors import ConfigError
from accel_core.plugins import Discovery, Record

__all__ = ["HANDOVER_VARIABLE", "Resolved", "find_file", "load"]

HANDOVER_VARIABLE: Final = "ACCEL_LAUNCH_CONFIG"
FILE_VARIABLE: Final = "ACCEL_CONFIG"
FILE_NAME: Final = "accel.yaml"

Settings = dict[Path, Setting]


@frozen(kw_only=True)
class Resolved:
    """A config, and where each of its values comes from."""

    config: RunConfig
    file: str | None = None
    """The file that was read, as it was named."""
    notes: Sequence[str] = ()
    """What was left unread, and why."""
    objects: Sequence[str] = ()
    """Plugins that Python configured by an object, and so asked for."""
    settings: Mapping[Path, Setting] = field(factory=dict, repr=False)
    """Path -> what was given for it; defaults are not here."""
    _reader: Reader = field(repr=False, eq=False)
    _bases: Mapping[Path, object] = field(factory=dict, repr=False)
    _strategies: Mapping[str, object] = field(factory=dict, repr=False)

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted path -> who set it, for whatever is not a default."""
        return {spell(path): setting.described for path, setting in self.settings.items()}

    @property
    def tree(self) -> Mapping[str, Any]:
        """Every value that ranks must share, defaults included, as JSON holds it."""
        whole: dict[str, Any] = plain(self.config)
        del whole["launch"]  # says how workers are started, and differs between machines
        return whole

    def digest(self) -> str:
        """A short hash of `tree`."""
        return hashlib.sha256(json.dumps(self.tree, sort_keys=True).encode()).hexdigest()[:16]

    def plugin_config(self, record: Record, alias: str | None = None) -> object | None:
        """The config object of a plugin, or of a named strategy; None if it has no options.

        Raises:
            ConfigError: it has a required option that nobody gave.
            PluginError: its config class cannot be used.
        """
        if alias is not None and alias in self._strategies:
            return self._strategies[alias]
        if record.name in self.config.plugins:
            return self.config.plugins[record.name]
        cls = load_class(record)
        problems: list[Problem] = []
        config: object = _instance(cls, (record.name,), {}, None, problems) if cls else None
        _raise_if_any(problems)
        return config

    def with_proposals(self, selected: Sequence[str], discovery: Discovery) -> Resolved:
        """The config after the chosen plugins (or named strategies) had their say.

        Raises:
            ConfigError: two want different values, or one contradicts what somebody set.
        """
        reader, settings = evolve(self._reader, problems=[]), dict(self.settings)
        for name, config in self._proposers(selected, discovery):
            for proposal in getattr(config, "propose", lambda _: ())(self.config):
                _propose(reader, settings, name, proposal)
        _raise_if_any(reader.problems)
        return _assemble(reader, settings, self._bases, self.file)

    def _proposers(self, selected: Sequence[str], discovery: Discovery) -> Iterator[tuple[str, object]]:
        """(name, config) of each config that is used; a plugin used by aliases only has only theirs."""
        for name in dict.fromkeys(selected):
            aliases = [alias for alias, plugin in self._reader.named.items() if name in (alias, plugin)]
            yield from ((alias, self._strategies.get(alias)) for alias in aliases)
            record = discovery.get(name)
            if record is not None and (not aliases or self.config.strategy == name):
                yield name, self.plugin_config(record)

    def handover(self) -> str:
        """What a launcher gives its workers instead of file, environment and flags: JSON text."""
        rows = [(path, plain(s.value), s.source, s.described) for path, s in self.settings.items()]
        return json.dumps({"file": self.file, "settings": rows}, indent=1)


def load(
    *,
    python: Mapping[str, object] | None = None,
    objects: Sequence[object] = (),
    flags: Mapping[str, str] | None = None,
    file: str | None = None,
    discovery: Discovery,
    environment: Mapping[str, str] = os.environ,
    directory: str | os.PathLike[str] = ".",
) -> Resolved:
    """Read all sources and merge them. Not collective; imports no torch.

    Args:
        python: dotted path -> what `Accelerator` was given for it; only what was given.
        objects: config objects; the class of each tells what it configures.
        flags: dotted path -> text.
        file: a YAML file; unset: what ACCEL_CONFIG names, else `accel.yaml` in `directory`, if any.
        discovery: the installed plugins.
        environment: variables ACCEL__SECTION__KEY. In a worker, ACCEL_LAUNCH_CONFIG names the
            launcher's handover, which stands for file, environment and flags; it is not read where
            flags or a file are given.
        directory: where `accel.yaml` is looked for.

    Raises:
        ConfigError: with every mistake of every source, each with its origin.
    """
    reader = Reader(discovery)
    settings: Settings = {}
    bases: dict[Path, object] = {}
    if environment.get(HANDOVER_VARIABLE) and not (flags or file):  # a worker may launch something else
        name, layers = _handed_over(environment[HANDOVER_VARIABLE])
    else:
        name = find_file(file, environment, directory)
        layers = _outer_layers(flags or {}, name, directory, environment, reader.problems)
    layers += python_layers(python or {}, objects, reader, bases)
    reader.named = _named_strategies(layers)
    for layer in layers:
        merge(settings, reader.read(layer), reader.problems)
    _check_accumulation(settings, reader.problems)
    _raise_if_any(reader.problems)
    return _assemble(reader, settings, bases, name)


def _propose(reader: Reader, settings: Settings, name: str, proposal: Proposal) -> None:
    place = tuple(proposal.path.split("."))
    layer = Layer("proposal", [(place, proposal.value)], lambda _: f"{name}: {proposal.reason}")
    for path, setting in reader.read(layer).items():
        before = settings.setdefault(path, setting)
        if before.value != setting.value:
            message = f"wants {plain(setting.value)!r}, but it is {plain(before.value)!r} by {before.origin}"
            reader.problems.append(Problem(setting.origin, path, message))


def find_file(
    file: str | None, environment: Mapping[str, str] = os.environ, directory: str | os.PathLike[str] = "."
) -> str | None:
    """The file that is read: `file`, else what ACCEL_CONFIG names, else accel.yaml where there is one."""
    named = file or environment.get(FILE_VARIABLE)
    return named or (FILE_NAME if FilePath(directory, FILE_NAME).exists() else None)


def _outer_layers(
    flags: Mapping[str, str],
    name: str | None,
    directory: str | os.PathLike[str],
    environment: Mapping[str, str],
    problems: list[Problem],
) -> list[Layer]:
    layers = [environment_layer(environment), flag_layer(flags)]
    if name is None:
        return layers
    from accel_core.config.yamlfile import read_yaml  # PyYAML costs 30 ms, and most tests have no file

    return [read_yaml(name, FilePath(directory), problems), *layers]


def _handed_over(name: str) -> tuple[str | None, list[Layer]]:
    """The layers that the launcher read; one a setting, for each has its own source and origin."""
    try:
        data = json.loads(FilePath(name).read_text(encoding="utf-8"))
        return data["file"], [_handed_layer(*row) for row in data["settings"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{HANDOVER_VARIABLE} names {name}, which no launcher wrote ({type(error).__name__}: {error})\n"
            f"unset {HANDOVER_VARIABLE}; `accel launch` sets it for its workers only"
        ) from error


def _handed_layer(path: Sequence[str], value: Any, source: Source, origin: str) -> Layer:
    return Layer(source, [(tuple(path), value)], lambda _: origin)


def _named_strategies(layers: Sequence[Layer]) -> dict[str, str]:
    """Alias -> plugin, as the strongest layer has it: an alias's options are read by its plugin."""
    named: dict[str, str] = {}
    for layer in layers:
        for place, raw in layer.entries:
            for path, value in _walk(place, raw):
                if path[0] == "strategies" and len(path) == 3 and path[2] == "plugin":
                    named[path[1]] = str(value)
    return named


def _walk(path: Path, raw: Any) -> list[tuple[Path, Any]]:
    if isinstance(raw, Text) and len(path) < 3:
        raw = mapping_in(raw)
    if path[0] == "strategies" and isinstance(raw, Mapping):
        return [found for key, value in raw.items() for found in _walk((*path, str(key)), value)]
    return [(path, raw)]


def _check_accumulation(settings: Settings, problems: list[Problem]) -> None:
    path, other = ("accumulation", "num_steps"), ("gradient_accumulation_steps",)
    one, two = settings.get(path), settings.get(other)
    if one and two and one.value != two.value:
        message = f"is {one.value}, but {spell(other)} is {two.value} by {two.origin}; give one of them"
        problems.append(Problem(one.origin, path, message))


# -- from settings to objects ------------------------------------------------------------------------


def _assemble(reader: Reader, settings: Settings, bases: Mapping[Path, object], file: str | None) -> Resolved:
    problems: list[Problem] = []

    def section(path: Path, cls: type) -> Any:
        return _instance(cls, path, settings, bases.get(path), problems)

    values = {name: section((name,), cls) for name, kind in CORE.items() if (cls := section_class(kind))}
    values |= {path[0]: setting.value for path, setting in settings.items() if len(path) == 1}
    names = dict.fromkeys(path[0] for path in (*settings, *bases) if path[0] not in CORE)
    plugins = {name: section((name,), cls) for name in names if (cls := reader.options_class(name))}
    strategies = {
        alias: section(("strategies", alias), cls)
        for alias, plugin in reader.named.items()
        if (cls := reader.options_class(plugin))
    }
    values["strategies"] = {
        alias: {"plugin": plugin} | _given(settings, ("strategies", alias))
        for alias, plugin in reader.named.items()
    }
    _raise_if_any(problems)
    return Resolved(
        config=RunConfig(**values, plugins=plugins),
        file=file,
        objects=tuple(path[0] for path in bases if len(path) == 1 and path[0] not in CORE),
        notes=tuple(reader.notes),
        settings=settings,
        reader=reader,
        bases=bases,
        strategies=strategies,
    )


def _given(settings: Settings, section: Path) -> dict[str, Any]:
    return {path[-1]: s.value for path, s in settings.items() if path[:-1] == section}


def _instance(cls: type, path: Path, settings: Settings, base: Any, problems: list[Problem]) -> Any:
    """The section's object: `base` itself where nobody else has a say, else one with all settings."""
    mine = {p: s for p, s in settings.items() if p[: len(path)] == path}
    if base is not None:
        rest = {p[len(path) :]: s.value for p, s in mine.items() if p[len(path)] in options_of(cls)}
        if all(value == _at(base, place) for place, value in rest.items()):
            return base
        cls = type(base)
    values = {}
    for alias, (attribute, kind) in options_of(cls).items():
        place, inner = (*path, alias), section_class(kind)
        if place in mine:
            values[alias] = mine[place].value
        elif inner and any(p[: len(place)] == place for p in mine):
            values[alias] = _instance(inner, place, mine, None, problems)
        elif attribute.default is NOTHING:
            message = f"required key missing; set it in section {spell(path)}"
            problems.append(Problem(_whose(mine), place, message))
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:  # a check of the class itself, over several options
        if not problems:
            problems.append(Problem(_whose(mine), path, str(error)))
    return None


def _at(instance: Any, path: Path) -> Any:
    for name in path:
        instance = getattr(instance, options_of(type(instance))[name][0].name)
    return instance


def _whose(settings: Mapping[Path, Setting]) -> str:
    return next((setting.origin for setting in settings.values()), "")


def _raise_if_any(problems: list[Problem]) -> None:
    if not problems:
        return
    lines = [str(problem) for problem in dict.fromkeys(sorted(problems, key=_position))]
    message = "\n".join([*lines, "correct this; `accel config check` looks again without training"])
    raise ConfigError(message, problems=lines)


def _position(problem: Problem) -> tuple[str, int, int]:
    found = re.fullmatch(r"(.*):(\d+):(\d+)", problem.origin)
    return (found[1], int(found[2]), int(found[3])) if found else ("\uffff", 0, 0)
