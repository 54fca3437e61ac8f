"""The config of a run: all sources merged into one table, and objects built from it.

Defaults < presets < file < environment < flags < Python < proposals. Each value keeps its origin, and all
mistakes are reported at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path as FilePath
from typing import Any, Final

from attrs import NOTHING, frozen

from accel_core.config import parallelism, sources
from accel_core.config.convert import flat, plain
from accel_core.config.sections import CORE, Sections, load_class, misspelt_variables
from accel_core.config.sources import (
    WORKER_CONFIG_VARIABLE,
    ConfigProblem,
    Origin,
    Setting,
    dotted,
    raise_problems,
)
from accel_core.config.table import Table
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Path, options_of
from accel_core.errors import ConfigError
from accel_core.plugins.discovery import Discovery, Record

FILE_VARIABLE: Final = "ACCEL_CONFIG"
FILE_NAME: Final = "accel.yaml"
STRENGTH: Final = ("preset", "file", "environment", "flag", "python")
"""The sources, the weakest first."""


@frozen(kw_only=True, eq=False, repr=False, slots=False)  # attrs compiles more for cached properties of slots
class Resolved:
    """A config, and the origin of each of its values."""

    config: RunConfig
    file: str | None = None
    """The file that was read, as the user named it."""
    sections: dict[Path, Any]
    """Path of each section that was built -> its config object; () is the config itself."""
    _table: Table

    @property
    def settings(self) -> Mapping[Path, Setting]:
        """Path of an option -> its value and origin; defaults are left out."""
        return self._table.settings

    @cached_property
    def origins(self) -> Mapping[str, str]:
        """Dotted path -> origin of the value, for all values other than defaults."""
        return {dotted(path): str(setting.origin) for path, setting in self.settings.items()}

    @property
    def notes(self) -> Sequence[str]:
        """Sentences on settings that were not read, with the reason."""
        return tuple(self._table.notes)

    @property
    def objects(self) -> Sequence[str]:
        """Plugins that Python configured by an object, which also selects them."""
        return tuple(path[0] for path in self._table.objects if len(path) == 1 and path[0] not in CORE)

    @cached_property
    def tree(self) -> Mapping[str, Any]:
        """JSON of all values that must be equal on all ranks, defaults included; secrets are masked."""
        whole: dict[str, Any] = plain(self.config, masks=True)
        del whole["launch"]  # says how workers are started, and differs between machines
        return whole

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield (dotted path, value as JSON, origin) of each option; secrets are masked."""
        values = plain(self.config, masks=True)
        for path, value in flat(values | values.pop("plugins")):
            option = path
            while option and option not in self.origins:  # a mapping that is one option has one origin
                option = option.rpartition(".")[0]
            yield path, value, self.origins.get(option, "default")

    def unknown_plugins(self) -> list[str]:
        """Return a line for each configured plugin name that no installed plugin of its slot has."""
        return [str(it) for it in sorted(self._table.unknown_plugins(), key=lambda it: it.position)]

    def plugin_config(self, record: Record, alias: str = "") -> Any:
        """Return the config of a plugin, or of a strategy by its alias; None if it has no options.

        Raises:
            ConfigError: a required option is missing.
            PluginError: the plugin's config class cannot be used.
        """
        path = ("strategies", alias) if alias in self.config.strategies else (record.name,)
        if path not in self.sections and (cls := load_class(record)):
            builder = _Builder(self._table)
            built = builder.build(cls, path)
            raise_problems(builder.problems)
            self.sections[path] = built
        return self.sections.get(path)

    def with_proposals(self, selected: Mapping[str, Record]) -> Resolved:
        """Return this config with the values that the configs of the selected plugins propose.

        Args:
            selected: name or alias -> plugin.

        Raises:
            ConfigError: two plugins propose different values, or a proposal contradicts another source.
        """
        proposals = [
            Setting(
                tuple(proposal.path.split(".")),
                proposal.value,
                Origin("proposal", f"{name}: {proposal.reason}"),
            )
            for name, record in selected.items()
            for proposal in getattr(self.plugin_config(record, name), "propose", lambda _: ())(self.config)
        ]
        return _resolved(self._table.with_proposals(proposals), self.file) if proposals else self

    def worker_config(self) -> str:
        """Return JSON text for a launcher's workers, which replaces file, environment and flags."""
        settings = [setting._replace(value=plain(setting.value)) for setting in self.settings.values()]
        return json.dumps({"file": self.file, "settings": settings})


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
        python: dotted path -> argument of `Accelerator`; only arguments that were passed.
        objects: config objects; the class of an object selects the section that it configures.
        presets: dotted path -> (value, origin); any other source overrides a preset.
        flags: (dotted path, text) of each flag; a path may have two spellings.
        file: a YAML file. Default: the file that ACCEL_CONFIG names, else an `accel.yaml` in `directory`.
        discovery: the installed plugins.
        environment: variables, of which ACCEL__SECTION__KEY are read. Default: this process's. In a worker,
            ACCEL_LAUNCH_CONFIG holds the launcher's config, which replaces file, flags and the variables at
            launch time. The commands of `accel` leave it out (`outside`), since they start another job.
        directory: the folder to look for `accel.yaml`.

    Raises:
        ConfigError: lists every mistake of every source, each with its origin.
    """
    environment = os.environ if environment is None else environment
    table, variables = Table(Sections(discovery)), list(sources.from_environment(environment))
    if environment.get(WORKER_CONFIG_VARIABLE):
        name, settings = sources.from_launcher(environment[WORKER_CONFIG_VARIABLE])
        # The script may have set variables since the launch: these override the launcher's.
        own = {variable.origin.place for variable in variables}
        settings = [it for it in settings if it.origin.place not in own]
    else:
        name, settings = find_file(file, environment, directory), []
        if name is not None:
            from accel_core.config.yamlfile import Document, read_yaml  # PyYAML costs 30 ms

            document = Document(name, table.places, table.problems)
            settings += read_yaml(document, FilePath(directory))
        settings += sources.from_flags(flags)
        table.problems += misspelt_variables(environment)
    arguments = sources.from_python(python or {}, objects)
    settings += [*sources.from_presets(presets or {}), *variables, *arguments]
    return _resolved(table.read(sorted(settings, key=lambda it: STRENGTH.index(it.origin.source))), name)


def outside() -> dict[str, str]:
    """Return the environment without a launcher's config, for jobs that a worker starts."""
    return {name: value for name, value in os.environ.items() if name != WORKER_CONFIG_VARIABLE}


def find_file(
    file: str | None,
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] = ".",
) -> str | None:
    """Return the file to read: `file`, the file that ACCEL_CONFIG names, or an existing accel.yaml."""
    if file is not None and not str(file):  # such as `--config "$UNSET"`
        raise ConfigError("--config names no file\nname one, or leave it out")
    named = file or (os.environ if environment is None else environment).get(FILE_VARIABLE)
    # A dangling link was meant to be read: the error of reading it says that the file is gone.
    return named or (FILE_NAME if os.path.lexists(FilePath(directory, FILE_NAME)) else None)


# -- from the table to objects -----------------------------------------------------------------------


def _resolved(table: Table, file: str | None) -> Resolved:
    builder = _Builder(table)
    config = builder.run_config()
    if problems := [*table.problems, *builder.problems]:
        raise_problems([*problems, *table.unknown_plugins()])  # all mistakes of a file in one pass
    return Resolved(config=config, file=file, sections=builder.built, table=table)


@cache
def _usual(section: type) -> Any:
    """Return a section with all defaults. Shared between runs, which do not change it."""
    return section()


class _Builder:
    """Builds config objects from a table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.problems: list[ConfigProblem] = []
        self.built: dict[Path, Any] = {}
        """Path of a section -> its object."""
        paths = [*table.settings, *table.objects]
        self._filled = {path[:depth] for path in paths for depth in range(len(path) + 1)}

    def run_config(self) -> RunConfig:
        """Build the config, with sections of plugins and named strategies."""
        sections, aliases = self.table.sections, self.table.strategies
        owners: dict[Path, str] = {
            path: path[0] for path in self._filled if len(path) == 1 and path[0] not in CORE
        }
        owners |= {("strategies", alias): str(named.value) for alias, named in aliases.items()}
        for path, plugin in owners.items():
            if cls := sections.class_of(plugin):
                self.build(cls, path)
        plugins = {path[0]: section for path, section in self.built.items() if len(path) == 1}
        options: dict[str, dict[str, Any]] = {alias: {} for alias in aliases}
        for path, setting in self.table.settings.items():
            if path[0] == "strategies":
                options[path[1]][dotted(path[2:])] = setting.value
        sizes = self._sizes()
        config: RunConfig = self.build(RunConfig, (), strategies=options, plugins=plugins, parallelism=sizes)
        return config

    def _sizes(self) -> Mapping[str, int]:
        """Return the sizes of section `parallelism`."""
        given = {path: it for path, it in self.table.settings.items() if path[0] == parallelism.SECTION}
        for path, setting in given.items():
            if problem := parallelism.wrong_size(setting.value):
                self.problems.append(ConfigProblem(setting.origin, path, problem))
        sizes = {path[1]: setting.value for path, setting in given.items()}
        if problem := parallelism.two_open(sizes):
            self._refuse((parallelism.SECTION,), problem, (parallelism.SECTION,))
        return sizes

    def build(self, cls: type, path: Path, **values: Any) -> Any:
        """Build a section's object, or return the object that Python passed if it has these values."""
        for name, option in options_of(cls).items():
            inner = (*path, name)
            setting = self.table.settings.get(inner)
            if setting is not None:
                values[name] = setting.value
            elif option.section and inner in self._filled:
                values[name] = self.build(option.section, inner)
            elif option.section and getattr(option.default, "factory", None) is option.section:
                values[name] = _usual(option.section)
            elif option.default is NOTHING and not self._has_problem(inner):
                self._refuse(path, f"required key missing; set it in section {dotted(path)}", inner)
        original = self.table.objects.get(path)
        try:
            built = (cls if original is None else type(original))(**values)
        except (TypeError, ValueError) as error:  # the class checks several options together
            if not self._has_problem(path):
                self._refuse(path, str(error), path)
            return original
        self.built[path] = original if built == original else built
        return self.built[path]

    def _has_problem(self, path: Path) -> bool:
        """Return True if an option, or a section's option, has a mistake: further ones may follow from it."""
        problems = [*self.table.problems, *self.problems]
        return any(problem.path[: len(path)] == path for problem in problems)

    def _refuse(self, section: Path, message: str, path: Path) -> None:
        """Add a problem, whose origin is the section's setting of the strongest source."""
        within = [it.origin for path, it in self.table.settings.items() if path[: len(section)] == section]
        origin = max(within, key=lambda it: STRENGTH.index(it.source), default=None)
        self.problems.append(ConfigProblem(origin, path, message))
