"""One flat table of a config: path of an option -> its typed value and origin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import attrs
from attrs import define, evolve, field

from accel_core.config import parallelism
from accel_core.config.convert import convert_option, plain, readings
from accel_core.config.sections import CORE, SLOTS, Sections
from accel_core.config.sources import ConfigProblem, Origin, RawText, Setting, dotted
from accel_core.contract.arguments import did_you_mean, quoted
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Option, Path, changed, masked, options_of
from accel_core.plugins import catalog

ALIASES: Final[Mapping[Path, Path]] = {("accumulation", "num_steps"): ("gradient_accumulation_steps",)}
"""Second name of an option -> its first name."""

_WRITTEN: Final = ("file", "environment", "flag")
"""Sources of text, which cannot hold Python objects."""


@define(eq=False, repr=False)
class Table:
    """The merged settings of all sources, and every mistake in them."""

    sections: Sections
    settings: dict[Path, Setting] = field(factory=dict)
    objects: dict[Path, object] = field(factory=dict)
    """Path of a section -> the object that Python passed; a run holds this very object."""
    strategies: dict[str, Setting] = field(factory=dict)
    """Alias in `strategies` -> the setting that names its plugin."""
    places: dict[Path, Origin] = field(factory=dict)
    """Path of a key in the file -> its place."""
    problems: list[ConfigProblem] = field(factory=list)
    notes: dict[str, None] = field(factory=dict)
    """Sentences on settings that were not read. A dict, for the order."""

    def read(self, settings: Iterable[Setting]) -> Table:
        """Put settings into the table, the weakest source first."""
        parts = [part for setting in settings for part in self._addressed(setting)]
        # Before any setting is placed: a stronger source may name the plugin of an alias.
        named = [it for it in parts if it.path[0] == "strategies" and it.path[2:] == ("plugin",)]
        self.strategies |= {setting.path[1]: setting for setting in named}
        for setting in parts:
            self._place(setting)
        self.settings |= {alias: self.settings[it] for alias, it in ALIASES.items() if it in self.settings}
        return self

    def with_proposals(self, settings: Iterable[Setting]) -> Table:
        """Return a table that has these settings too.

        The settings of this table are not converted again: a value may be a generator.
        """
        return evolve(self, settings=dict(self.settings), notes=dict(self.notes), problems=[]).read(settings)

    def unknown_plugins(self) -> Iterator[ConfigProblem]:
        """Report each plugin name that no installed plugin of its slot has."""
        discovery = self.sections.discovery
        for path, setting in self.settings.items():
            slot = "strategy" if path[0] == "strategies" else SLOTS.get(path)
            if path == ("device",):
                if unknown := catalog.unknown_device(setting.value, discovery):
                    yield ConfigProblem(setting.origin, path, unknown)
            elif slot and (path[0] != "strategies" or path[2:] == ("plugin",)):
                names = setting.value if isinstance(setting.value, tuple) else (setting.value,)
                for name in (it for it in names if it not in {"auto", "no", "all", *self.strategies}):
                    if not discovery.answering(slot, name):
                        message = catalog.not_installed(name, slot, discovery)
                        yield ConfigProblem(setting.origin, path, message)

    # -- from a setting to an option -----------------------------------------------------------------

    def _refuse(self, setting: Setting, message: str, path: Path | None = None) -> None:
        self.problems.append(ConfigProblem(setting.origin, path or setting.path, message))

    def _addressed(self, setting: Setting) -> Iterator[Setting]:
        """Yield settings with a path: objects get the path of their section, `strategies` is split."""
        path, value = setting.path, setting.value
        if not path and isinstance(value, parallelism.ParallelismConfig):
            yield setting._replace(path=(parallelism.SECTION,))
            return
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
            parts = list(self._keys(setting))
            yield from (inner for part in parts for inner in self._addressed(part))
            if len(path) == 2 and not parts:
                yield setting  # names no plugin

    def _place(self, setting: Setting) -> None:
        """Walk down to the section or option of a setting, and store the value there."""
        at: Path = ()
        stands: type | Option | None = RunConfig
        for name in setting.path:
            if isinstance(stands, Option):
                whole = f"has no keys of its own; give it whole, not {dotted(setting.path)}"
                return self._refuse(setting, whole, at)
            at = (*at, name)
            stands = stands and self._within(stands, at, setting)
        if isinstance(stands, Option):
            self._set(setting, stands)
        elif stands:
            for part in self._keys(setting, stands):
                self._place(part)
        return None

    def _within(self, section: type, at: Path, setting: Setting) -> type | Option | None:
        """Return the section or option at a path; None if the setting was refused or not read."""
        match at:
            case ["strategies"]:
                return RunConfig  # its keys are aliases: the next case
            case ["strategies", alias]:
                return self._strategy(alias, setting)
            case ["strategies", _, "plugin"]:
                return options_of(RunConfig)["strategy"]
            case [parallelism.SECTION]:
                return RunConfig  # its keys are dimensions: the next case
            case [parallelism.SECTION, name]:
                return self._dimension(name, setting)
            case [name] if name not in CORE:
                return self._plugin(name, at, setting)
        option = options_of(section).get(at[-1])
        if option is None:
            self._refuse(setting, f"unknown key{self._hint(at, section)}", at)
        return option and (option.section or option)

    def _strategy(self, alias: str, setting: Setting) -> type | None:
        """Return the section of a named strategy."""
        plugin = self.strategies.get(alias)
        if plugin is None or not isinstance(plugin.value, str) or not plugin.value:
            self._refuse(setting, "needs a key 'plugin' that names its strategy", ("strategies", alias))
            return None
        if setting.path[2:] == ("plugin",):
            return RunConfig  # the name is a value, whether or not the plugin is installed
        return self._plugin(str(plugin.value), setting.path[:3], setting)

    def _dimension(self, name: str, setting: Setting) -> Option | None:
        """Return the option of a dimension that an installed plugin has."""
        if problem := parallelism.unknown_dimension(name, self.sections.discovery):
            self._refuse(setting, problem, (parallelism.SECTION, name))
            return None
        return Option(name=name, kind=int)

    def _plugin(self, name: str, at: Path, setting: Setting) -> type | None:
        """Return a plugin's section; if there is none, refuse the setting or leave it unread."""
        if (cls := self.sections.class_of(name)) is None:
            self._leave_unread(setting, name, at)
        return cls

    def _keys(self, setting: Setting, cls: type | None = None) -> Iterator[Setting]:
        """Yield the settings of a section's keys; of an object, the values that are not the default."""
        raw, path = setting.value, setting.path
        if isinstance(raw, RawText):
            raw = next(readings(raw))
        if cls and isinstance(raw, cls):
            if path in self.objects:
                self._refuse(setting, f"a second object for section {dotted(path)}; give one")
            self.objects[path] = raw
            raw = changed(raw)
        if isinstance(raw, Mapping):
            is_file = setting.origin.source == "file"
            for key in raw:
                inner = (*path, str(key))
                origin = self.places.get(inner, setting.origin) if is_file else setting.origin
                yield Setting(inner, raw[key], origin)
        elif raw is not None:  # a section whose keys are all commented out
            self._refuse(setting, f"is a section: expected keys and values, got {quoted(raw)}")

    def _set(self, setting: Setting, option: Option) -> None:
        """Convert the value of an option, and merge it with the value of weaker sources."""
        raw, path = setting.value, ALIASES.get(setting.path, setting.path)
        if raw is None and path != setting.path:
            return  # null under the second name: the first name counts
        is_written = setting.origin.source in _WRITTEN
        try:
            if option.dimension and is_written:
                raise ValueError(f"sizes are in section parallelism; write parallelism.{option.dimension}")
            if option.python_only and is_written:
                raise ValueError("can be given in Python only")
            if option.converter and not is_written:
                raw = option.converter(raw)
            value = convert_option(raw, option)
        except (TypeError, ValueError) as error:
            self._refuse(setting, str(error))
        else:
            self._merge(setting._replace(path=path, value=value), option.secret)
            if option.dimension and value is not None:
                self._merge(
                    setting._replace(path=(parallelism.SECTION, option.dimension), value=value), False
                )

    def _merge(self, new: Setting, secret: bool) -> None:
        """Let the stronger source win; refuse a contradiction that must be a mistake.

        Python may not contradict a flag or a variable, and a proposal may not contradict any source. A
        source may not contradict itself either, for example by two names of one option.
        """
        old = self.settings.setdefault(new.path, new)
        stronger, weaker = new.origin.source, old.origin.source
        if old is new or old.value == new.value:
            if stronger != "proposal":
                self.settings[new.path] = new
            return
        ours, theirs = (quoted(masked(plain(it.value, masks=True), secret)) for it in (new, old))
        if stronger == "proposal":
            self._refuse(new, f"wants {ours}, but it is {theirs} by {old.origin}")
        elif stronger == weaker != "preset" or (stronger == "python" and weaker not in ("preset", "file")):
            self._refuse(new, f"{ours} here, but {theirs} by {old.origin}; give it once")
        else:
            origin = new.origin._replace(over=f"{theirs} from {old.origin}")
            self.settings[new.path] = new._replace(origin=origin)

    # -- settings for no option ----------------------------------------------------------------------

    def _leave_unread(self, setting: Setting, name: str, path: Path) -> None:
        """Note a section that this installation cannot read; refuse a section that no installation has."""
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
        """Return a hint at a similar name, or at the same key in another section; else empty."""
        *section, name = path
        names, discovery = list(options_of(cls)), self.sections.discovery
        word = "_".join(path) if name in ("size", "degree") else name
        if word.endswith(("_size", "_degree")) and (meant := parallelism.nearest(word, discovery)):
            return meant
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
