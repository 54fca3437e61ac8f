"""Merging of all sources into one config.

Defaults < presets < file < environment < flags < Python < proposals. `load` goes in three passes:
the sources give values (`sources`, `yamlfile`), the values become one table of typed options
(`placing`, `table`), and the table becomes config objects (here). Each value keeps its origin, and all
mistakes are reported at once. Python may not contradict a flag or a variable, and the proposal of a plugin
may not contradict any source.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Final

from attrs import NOTHING, evolve, frozen

from accel_core.config import sources
from accel_core.config.convert import flat, plain, shown
from accel_core.config.placing import Placement
from accel_core.config.sections import CORE, Sections, load_class, misspelt_variables, unblocked_names
from accel_core.config.sources import (
    WORKER_CONFIG_VARIABLE,
    ConfigProblem,
    SourceValue,
    dotted,
    raise_problems,
)
from accel_core.config.table import ALIASES, Table
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Path, options_of, section_class
from accel_core.errors import ConfigError
from accel_core.plugins.catalog import not_installed
from accel_core.plugins.discovery import Discovery, Record

FILE_VARIABLE: Final = "ACCEL_CONFIG"
FILE_NAME: Final = "accel.yaml"


@frozen(kw_only=True, eq=False, repr=False)
class Resolved:
    """A config, and where each of its values comes from."""

    config: RunConfig
    file: str | None = None
    """The file that was read, as the user named it."""
    _table: Table
    _environment: Mapping[str, str]
    _strategies: Mapping[str, object]

    @property
    def settings(self) -> Mapping[Path, SourceValue]:
        """Path of an option -> its value and origin; defaults are left out."""
        return self._table.settings

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted path -> origin of the value, for all that is not a default."""
        origins = {path: value.origin for path, value in self.settings.items()}
        origins |= {alias: origins[path] for alias, path in ALIASES.items() if path in origins}
        return {dotted(path): origin for path, origin in origins.items()}

    @property
    def notes(self) -> Sequence[str]:
        """Sentences on what was left unread, and why."""
        return tuple(self._table.placement.notes)

    def section(self, path: Path) -> object | None:
        """Build the config object of a section of core, a plugin or a named strategy."""
        if len(path) == 2 and path[0] == "strategies":
            return self._strategies.get(path[1])
        name = path[0] if len(path) == 1 else ""
        return self.config.plugins.get(name) or getattr(self.config, name, None) if name else None

    @property
    def objects(self) -> Sequence[str]:
        """Plugins that Python configured by an object, and so asked for."""
        return tuple(
            path[0] for path in self._table.placement.objects if len(path) == 1 and path[0] not in CORE
        )

    @property
    def tree(self) -> Mapping[str, Any]:
        """JSON of all values that ranks must share, defaults too; secrets are masked."""
        whole: dict[str, Any] = shown(self.config)
        del whole["launch"]  # says how workers are started, and differs between machines
        return whole

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted path, value as JSON, origin) of each option; secrets are masked."""
        values, origins = shown(self.config), self.origins
        for path, value in flat(values | values.pop("plugins")):
            given = path
            while given and given not in origins:  # a mapping that is one option has one origin
                given = given.rpartition(".")[0]
            yield path, value, origins.get(given, "default")

    def digest(self) -> str:
        """Return a short hash of `tree`."""
        return hashlib.sha256(json.dumps(self.tree, sort_keys=True).encode()).hexdigest()[:16]

    def unknown_plugins(self) -> Iterator[str]:
        """Write a line for each plugin name that no installed plugin of its slot has."""
        discovery = self._table.placement.sections.discovery
        for path, slot, name in self.config.plugin_names():
            if not discovery.answering(slot, name):
                origin = self.settings[path].origin if path in self.settings else ""
                yield str(ConfigProblem(origin, path, not_installed(name, slot, discovery)))

    def plugin_config(self, record: Record, alias: str | None = None) -> object | None:
        """Return the config of a plugin or a named strategy; None without options.

        Raises:
            ConfigError: a required option is missing.
            PluginError: its config class cannot be used.
        """
        config = self._strategies.get(alias or "", self.config.plugins.get(record.name))
        cls = None if config is not None else load_class(record)
        if cls is not None:
            table = evolve(self._table, problems=[])
            config = _build(cls, (record.name,), table)
            raise_problems(table.problems)
        return config

    def with_proposals(self, selected: Sequence[str]) -> Resolved:
        """Return the config with the proposals of these plugins or named strategies.

        Raises:
            ConfigError: two propose different values, or one contradicts another source.
        """
        proposals = [
            SourceValue(
                tuple(proposal.path.split(".")), proposal.value, "proposal", f"{name}: {proposal.reason}"
            )
            for name, config in self._configs(selected)
            for proposal in getattr(config, "propose", lambda _: ())(self.config)
        ]
        if not proposals:
            return self
        table = self._table.with_values(proposals)
        return _resolved(table, self.file, self._environment)

    def _configs(self, selected: Sequence[str]) -> Iterator[tuple[str, object]]:
        """(name, config) of each used config; a plugin may be used by its aliases only."""
        for name in dict.fromkeys(selected):
            plugins = {alias: plugin.value for alias, plugin in self._table.placement.aliases.items()}
            aliases = [alias for alias, plugin in plugins.items() if name in (alias, plugin)]
            yield from ((alias, self._strategies.get(alias)) for alias in aliases)
            record = self._table.placement.sections.discovery.get(name)
            if record is not None and (not aliases or self.config.strategy == name):
                yield name, self.plugin_config(record)

    def worker_config(self) -> str:
        """JSON text for a launcher's workers, instead of file, environment and flags."""
        rows = [(path, plain(s.value), s.source, s.origin) for path, s in self.settings.items()]
        variables = sources.fingerprints(self._environment)
        return json.dumps({"file": self.file, "variables": variables, "settings": rows}, indent=1)


def load(
    *,
    python: Mapping[str, object] | None = None,
    objects: Sequence[object] = (),
    presets: Mapping[str, tuple[object, str]] | None = None,
    flags: Iterable[tuple[str, str]] = (),
    file: str | None = None,
    discovery: Discovery,
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] = ".",
) -> Resolved:
    """Read all sources and merge them. Not collective; imports no torch.

    Args:
        python: dotted path -> argument of `Accelerator`; only what was given.
        objects: config objects; the class of each tells what it configures.
        presets: dotted path -> (value, origin); any other source wins over them.
        flags: (dotted path, text) of each; one path may come by two spellings.
        file: a YAML file; unset: what ACCEL_CONFIG names, else `accel.yaml` in `directory`, if any.
        discovery: the installed plugins.
        environment: variables ACCEL__SECTION__KEY. In a worker, ACCEL_LAUNCH_CONFIG names the
            launcher's config, which stands for file, flags and the variables of that time; the
            commands of `accel` leave it out (`outside`), since what they start is another job.
        directory: where `accel.yaml` is looked for.

    Raises:
        ConfigError: with every mistake of every source, each with its origin.
    """
    environment = os.environ if environment is None else environment
    placement, values = Placement(Sections(discovery)), list[SourceValue]()
    if environment.get(WORKER_CONFIG_VARIABLE):
        name, values = sources.from_launcher(environment[WORKER_CONFIG_VARIABLE], environment)
    else:
        name = find_file(file, environment, directory)
        if name is not None:
            from accel_core.config.yamlfile import read_yaml  # PyYAML costs 30 ms; most tests have no file

            values += read_yaml(name, FilePath(directory), placement.problems)
        values += [*sources.from_environment(environment), *sources.from_flags(flags)]
        placement.problems += misspelt_variables(environment)
        placement.report(unblocked_names(environment, discovery))
    arguments = sources.from_python(python or {}, objects)
    placement.place([*sources.from_presets(presets or {}), *values, *arguments])
    return _resolved(Table(placement, placement.problems).read(), name, environment)


def outside() -> dict[str, str]:
    """Return the environment without a launcher's config, for a worker's own jobs."""
    return {name: value for name, value in os.environ.items() if name != WORKER_CONFIG_VARIABLE}


def find_file(
    file: str | None,
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] = ".",
) -> str | None:
    """Find the file to read: `file`, ACCEL_CONFIG's, or an existing accel.yaml."""
    if file is not None and not str(file):  # as `--config "$UNSET"` has it
        raise ConfigError("--config names no file\nname one, or leave it out")
    named = file or (os.environ if environment is None else environment).get(FILE_VARIABLE)
    # A link to a file that is gone was meant to be read: reading it says so.
    return named or (FILE_NAME if os.path.lexists(FilePath(directory, FILE_NAME)) else None)


# -- pass 3: from the table to objects ---------------------------------------------------------------


def _resolved(table: Table, file: str | None, environment: Mapping[str, str]) -> Resolved:
    raise_problems(table.problems)
    built = {
        path: _build(cls, path, table)
        for path, cls in table.placement.classes.items()
        if cls and (len(path) == 2 or table.within(path))
    }
    strategies = {path[1]: section for path, section in built.items() if len(path) == 2}
    plugins = {path[0]: section for path, section in built.items() if len(path) == 1}
    options: dict[str, dict[str, Any]] = {alias: {} for alias in table.placement.aliases}
    for path, value in table.settings.items():
        if path[0] == "strategies":
            options[path[1]][dotted(path[2:])] = value.value
    config: RunConfig = _build(RunConfig, (), table, strategies=options, plugins=plugins)
    raise_problems(table.problems)
    return Resolved(config=config, file=file, table=table, environment=environment, strategies=strategies)


def _build(cls: type, path: Path, table: Table, **values: Any) -> Any:
    """Build a section's object, or return Python's own if it has all the settings."""
    origin = _origin(table, path)
    for name, (attribute, kind) in options_of(cls).items():
        option = ALIASES.get((*path, name), (*path, name))
        section = section_class(kind)
        if option in table.settings:
            values[name] = table.settings[option].value
        elif section and table.within(option):
            values[name] = _build(section, option, table)
        elif attribute.default is NOTHING:
            message = f"required key missing; set it in section {dotted(path)}"
            table.problems.append(ConfigProblem(origin, option, message))
    given = table.placement.objects.get(path)
    try:
        built = (cls if given is None else type(given))(**values)
    except (TypeError, ValueError) as error:  # a check of the class itself, over several options
        if not table.problems:
            table.problems.append(ConfigProblem(_origin(table, path, str(error)), path, str(error)))
        return given
    return given if built == given else built


def _origin(table: Table, path: Path, problem: str = "") -> str:
    """Return the origin of a section's option: the first named, else the first."""
    settings = table.settings
    origins = {inner[-1]: settings[inner].origin for inner in table.within(path) if inner in settings}
    named = (origins[word] for word in re.findall(r"\w+", problem) if word in origins)
    return next(named, next(iter(origins.values()), ""))
