"""Sections of core and of the installed plugins, and their config classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Final

from attrs import define, field

from accel_core.config.convert import writable
from accel_core.config.sources import ConfigProblem
from accel_core.contract.arguments import did_you_mean
from accel_core.contract.config import RunConfig
from accel_core.contract.options import describe, options_of, section_class
from accel_core.errors import PluginError
from accel_core.plugins import catalog
from accel_core.plugins.discovery import BLOCK_VARIABLE, Discovery, Record, blocked_names, load

CORE: Final = {n: section_class(kind) for n, (_, kind) in options_of(RunConfig).items() if n != "plugins"}
"""Core's own top-level options and sections: name -> a section's class."""


@define(slots=False, eq=False, repr=False)  # attrs compiles another method for cached properties of slots
class Sections:
    """Config classes by section name; a plugin's class is imported on first use."""

    discovery: Discovery
    _classes: dict[str, type | None] = field(factory=dict, init=False)
    faults: dict[str, str] = field(factory=dict, init=False)
    """Name of a plugin whose class cannot be imported -> the reason."""

    def class_of(self, name: str) -> type | None:
        """Return the class of a section; None if it is unknown or cannot be imported."""
        if name in CORE:
            return CORE[name]
        if name not in self._classes:
            record, self._classes[name] = self.discovery.get(name), None
            try:  # choosing the plugin raises this error; for its section a note will do
                self._classes[name] = load_class(record) if record else None
            except PluginError as error:
                self.faults[name] = str(error.__cause__ or error).partition("\n")[0]
        return self._classes[name]

    def all(self) -> Iterator[tuple[str, type]]:
        """All sections and their classes, core's first."""
        for name in (*CORE, *(record.name for record in self.discovery.records)):
            if (cls := self.class_of(name)) is not None:
                yield name, cls

    def spell(self, word: str) -> str:
        """Read a plugin's name from a variable or flag, which cannot spell hyphens."""
        return self._spellings.get(word, word)

    @cached_property
    def _spellings(self) -> Mapping[str, str]:
        return {name.replace("-", "_"): name for name in self.discovery.names}

    def configured_by(self, config: object) -> str | None:
        """Find the section with the object's class, or the closest class above."""
        for names in (CORE, (record.name for record in self.discovery.records)):
            section_of = {self.class_of(name): name for name in names}
            name = next((section_of[cls] for cls in type(config).__mro__ if cls in section_of), None)
            if name:
                return name
        return None


def misspelt_variables(environment: Iterable[str]) -> Iterator[ConfigProblem]:
    """Report each variable with one underscore first, as ACCEL_MIXED_PRECISION."""
    ours = sorted(name for name in environment if name.upper().startswith("ACCEL_") and name[6:7] != "_")
    options: dict[str, str] = {}
    for name, inner in CORE.items() if ours else ():
        options |= {f"{name}_{key}": f"{name}__{key}" for key in options_of(inner)} if inner else {name: name}
    for name in ours:
        rest = name.upper().removeprefix("ACCEL_")
        option = options.get(rest.lower().replace("__", "_"), rest if "__" in rest else None)
        if option is not None:
            meant = f"ACCEL__{option.upper()}"
            yield ConfigProblem(f"variable {name}", (), f"is never read; did you mean {meant}?")


def unblocked_names(environment: Mapping[str, str], discovery: Discovery) -> Iterator[ConfigProblem | str]:
    """Report each name in ACCEL_PLUGINS_BLOCK that blocks nothing; a str is a note.

    A list that is shared by several installations may name plugins that only others have.
    """
    where, blocked = f"variable {BLOCK_VARIABLE}", dict.fromkeys(blocked_names(environment))
    entries = catalog.catalog_entries() if blocked else ()  # reading the catalog costs 30 ms
    known = {*discovery.names, *(entry.name for entry in entries)}
    for name in blocked:
        if name in discovery.names and name not in discovery.blocked:
            yield ConfigProblem(where, (), f"{name} is part of accel-core, and cannot be blocked")
        elif name not in known and (hint := did_you_mean(name, sorted(known))):
            yield ConfigProblem(where, (), f"no plugin {name!r} is installed{hint}")
        elif name not in known:
            yield f"{where}: no plugin {name!r} is installed; `accel plugins` lists what is"


def load_class(record: Record) -> type | None:
    """Return the config class that a plugin's card names.

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
        raise record.error(
            f": {record.card.config} cannot be read as options\n"
            f"{type(error).__name__}: {error}\n"
            "make it an attrs class, and option(python_only=True) what only Python can hold or import"
        ) from error
    return cls


def _refuse_unwritable(cls: type, section: str = "") -> None:
    """Refuse options of types that neither a file nor a shell can hold."""
    for name, (attribute, kind) in options_of(cls).items():
        if not describe(attribute).python_only and not writable(kind):
            raise TypeError(f"no file, variable or flag can hold option {section}{name}: {attribute.type}")
        if inner := section_class(kind):
            _refuse_unwritable(inner, f"{section}{name}.")
