"""One config out of all sources: defaults < presets < file < environment < flags < Python < proposals.

Each value keeps its origin, and all mistakes are reported at once. What Python says may not
contradict a flag or the environment; what a plugin proposes may not contradict anybody.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Final

from attrs import NOTHING, evolve, field, frozen

from accel_core.config import sources
from accel_core.config.reader import ALIASES, CORE, Reader, load_class
from accel_core.config.sources import HANDOVER_VARIABLE, Given, Problem, spell
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Path, options_of, section_class
from accel_core.errors import ConfigError
from accel_core.plugins.discovery import Discovery, Record
from accel_core.plugins.known import absence

__all__ = ["HANDOVER_VARIABLE", "Resolved", "find_file", "load", "outside"]

FILE_VARIABLE: Final = "ACCEL_CONFIG"
FILE_NAME: Final = "accel.yaml"


@frozen(kw_only=True)
class Resolved:
    """A config, and where each of its values comes from."""

    config: RunConfig
    file: str | None = None
    """The file that was read, as it was named."""
    _reader: Reader = field(repr=False, eq=False)
    _environment: Mapping[str, str] = field(repr=False, eq=False)
    _strategies: Mapping[str, object] = field(repr=False)

    @property
    def settings(self) -> Mapping[Path, Given]:
        """Path of an option -> who gave which value; defaults are not here."""
        return self._reader.settings

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted path -> who set it, for whatever is not a default."""
        found = {path: given.origin for path, given in self.settings.items()}
        found |= {alias: found[path] for alias, path in ALIASES.items() if path in found}
        return {spell(path): origin for path, origin in found.items()}

    @property
    def notes(self) -> Sequence[str]:
        """What was left unread, and why."""
        return tuple(self._reader.notes)

    def section(self, path: Path) -> object | None:
        """The config object of a section, by its path: core's, a plugin's or a named strategy's."""
        if len(path) == 2 and path[0] == "strategies":
            return self._strategies.get(path[1])
        name = path[0] if len(path) == 1 else ""
        return self.config.plugins.get(name) or getattr(self.config, name, None) if name else None

    @property
    def objects(self) -> Sequence[str]:
        """Plugins that Python configured by an object, and so asked for."""
        return tuple(path[0] for path in self._reader.objects if len(path) == 1 and path[0] not in CORE)

    @property
    def tree(self) -> Mapping[str, Any]:
        """Every value that ranks must share, defaults included, as JSON holds it; secrets are masked."""
        from accel_core.config.structure import shown

        whole: dict[str, Any] = shown(self.config)
        del whole["launch"]  # says how workers are started, and differs between machines
        return whole

    def digest(self) -> str:
        """A short hash of `tree`."""
        return hashlib.sha256(json.dumps(self.tree, sort_keys=True).encode()).hexdigest()[:16]

    def misnamed(self) -> Iterator[str]:
        """A line for each name that no installed plugin of its slot has."""
        discovery = self._reader.discovery
        for path, slot, name in self.config.plugin_names():
            record = discovery.get(name)
            if record is None or record.slot != slot:
                origin = self.settings[path].origin if path in self.settings else ""
                yield str(Problem(origin, path, absence(name, slot, discovery)))

    def plugin_config(self, record: Record, alias: str | None = None) -> object | None:
        """The config object of a plugin, or of a named strategy; None if it has no options.

        Raises:
            ConfigError: it has a required option that nobody gave.
            PluginError: its config class cannot be used.
        """
        held = self._strategies.get(alias or "", self.config.plugins.get(record.name))
        if held is not None:
            return held
        cls, reader = load_class(record), evolve(self._reader, problems=[])
        config: object = _built(cls, (record.name,), reader) if cls else None
        reader.finish()
        return config

    def with_proposals(self, selected: Sequence[str]) -> Resolved:
        """The config after the chosen plugins (or named strategies) had their say.

        Raises:
            ConfigError: two want different values, or one contradicts what somebody set.
        """
        reader = evolve(self._reader, settings=dict(self.settings), problems=[])
        reader.read(
            Given(tuple(proposal.path.split(".")), proposal.value, "proposal", f"{name}: {proposal.reason}")
            for name, config in self._configs(selected)
            for proposal in getattr(config, "propose", lambda _: ())(self.config)
        )
        return _resolved(reader, self.file, self._environment)

    def _configs(self, selected: Sequence[str]) -> Iterator[tuple[str, object]]:
        """(name, config) of each config that is used; a plugin used by aliases only has only theirs."""
        for name in dict.fromkeys(selected):
            aliases = [alias for alias, plugin in self._reader.named.items() if name in (alias, plugin)]
            yield from ((alias, self._strategies.get(alias)) for alias in aliases)
            record = self._reader.discovery.get(name)
            if record is not None and (not aliases or self.config.strategy == name):
                yield name, self.plugin_config(record)

    def handover(self) -> str:
        """What a launcher gives its workers instead of file, environment and flags: JSON text."""
        from accel_core.config.structure import plain

        rows = [(path, plain(s.value), s.source, s.origin) for path, s in self.settings.items()]
        held = {"file": self.file, "variables": sources.fingerprints(self._environment), "settings": rows}
        return json.dumps(held, indent=1)


def load(
    *,
    python: Mapping[str, object] | None = None,
    objects: Sequence[object] = (),
    presets: Mapping[str, tuple[object, str]] | None = None,
    flags: Mapping[str, str] | None = None,
    file: str | None = None,
    discovery: Discovery,
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] = ".",
) -> Resolved:
    """Read all sources and merge them. Not collective; imports no torch.

    Args:
        python: dotted path -> what `Accelerator` was given for it; only what was given.
        objects: config objects; the class of each tells what it configures.
        presets: dotted path -> (value, who says so), which any other source wins over.
        flags: dotted path -> text.
        file: a YAML file; unset: what ACCEL_CONFIG names, else `accel.yaml` in `directory`, if any.
        discovery: the installed plugins.
        environment: variables ACCEL__SECTION__KEY. In a worker, ACCEL_LAUNCH_CONFIG names the
            launcher's handover, which stands for file, flags and the variables of that time; the
            commands of `accel` leave it out (`outside`), since what they start is another job.
        directory: where `accel.yaml` is looked for.

    Raises:
        ConfigError: with every mistake of every source, each with its origin.
    """
    environment = os.environ if environment is None else environment
    reader, givens = Reader(discovery), list[Given]()
    if environment.get(HANDOVER_VARIABLE):
        name, givens = sources.from_launcher(environment[HANDOVER_VARIABLE], environment)
    else:
        name = find_file(file, environment, directory)
        if name is not None:
            from accel_core.config.yamlfile import read_yaml  # PyYAML costs 30 ms; most tests have no file

            givens += read_yaml(name, FilePath(directory), reader.problems)
        givens += [*sources.from_environment(environment), *sources.from_flags(flags or {})]
        reader.refuse_near_variables(environment)
    reader.read([*sources.from_presets(presets or {}), *givens, *sources.from_python(python or {}, objects)])
    return _resolved(reader, name, environment)


def outside() -> dict[str, str]:
    """The environment without the handover of a launcher, whose worker this process may be."""
    return {name: value for name, value in os.environ.items() if name != HANDOVER_VARIABLE}


def find_file(
    file: str | None,
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] = ".",
) -> str | None:
    """The file that is read: `file`, else what ACCEL_CONFIG names, else accel.yaml where there is one."""
    if file is not None and not str(file):  # as `--config "$UNSET"` has it
        raise ConfigError("--config names no file\nname one, or leave it out")
    named = file or (os.environ if environment is None else environment).get(FILE_VARIABLE)
    # A link to a file that is gone was meant to be read: reading it says so.
    return named or (FILE_NAME if os.path.lexists(FilePath(directory, FILE_NAME)) else None)


# -- from settings to objects ------------------------------------------------------------------------


def _resolved(reader: Reader, file: str | None, environment: Mapping[str, str]) -> Resolved:
    reader.finish()
    names = dict.fromkeys(path[0] for path in (*reader.settings, *reader.objects) if path[0] not in CORE)
    classes = {alias: reader.section(plugin) for alias, plugin in reader.named.items()}
    strategies = {alias: _built(cls, ("strategies", alias), reader) for alias, cls in classes.items() if cls}
    options: dict[str, dict[str, Any]] = {alias: {} for alias in classes}
    for path, given in reader.settings.items():
        if path[0] == "strategies":
            options[path[1]][spell(path[2:])] = given.value
    config: RunConfig = _built(
        RunConfig,
        (),
        reader,
        strategies=options,
        plugins={name: _built(cls, (name,), reader) for name in names if (cls := reader.section(name))},
    )
    reader.finish()
    return Resolved(config=config, file=file, reader=reader, environment=environment, strategies=strategies)


def _built(cls: type, path: Path, reader: Reader, **values: Any) -> Any:
    """The section's object: the one that Python gave where nobody else has a say, else with all settings."""
    touched = reader.within(path)
    origin = next((reader.settings[place].origin for place in touched if place in reader.settings), "")
    for alias, (attribute, kind) in options_of(cls).items():
        named, inner = (*path, alias), section_class(kind)
        place = ALIASES.get(named, named)
        if place in reader.settings:
            values[alias] = reader.settings[place].value
        elif inner and reader.within(place):
            values[alias] = _built(inner, place, reader)
        elif attribute.default is NOTHING:
            message = f"required key missing; set it in section {spell(path)}"
            reader.problems.append(Problem(origin, place, message))
    given = reader.objects.get(path)
    try:
        made = (cls if given is None else type(given))(**values)
    except (TypeError, ValueError) as error:  # a check of the class itself, over several options
        if not reader.problems:
            reader.problems.append(Problem(origin, path, str(error)))
        return given
    return given if made == given else made
