"""Sections of core and of the installed plugins, and their config classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import define, field

from accel_core.config.sources import ConfigProblem, Origin
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Path, options_of
from accel_core.errors import PluginError
from accel_core.plugins.discovery import Discovery, Record, guarded, load

if TYPE_CHECKING:
    from accel_core.contract.card import Slot

CORE: Final = {name: it.section for name, it in options_of(RunConfig).items() if name != "plugins"}
"""Core's top-level options and sections: name -> class of a section, None for an option."""


SLOTS: Final[Mapping[Path, Slot]] = {
    ("device",): "device",
    ("mixed_precision",): "precision",
    ("strategy",): "strategy",
    ("launch", "launcher"): "launcher",
    ("extensions",): "extension",
    ("log_with",): "tracker",
}
"""Option that names plugins -> their slot."""


@define(eq=False, repr=False)
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
            record = self.discovery.get(name)
            try:  # only choosing the plugin raises this error; its section gets a note
                self._classes[name] = load_class(record) if record else None
            except PluginError as error:
                self._classes[name] = None
                self.faults[name] = str(error.__cause__ or error).partition("\n")[0]
        return self._classes[name]

    def all(self) -> Iterator[tuple[str, type]]:
        """Yield each section and its class, core's sections first."""
        for name in (*CORE, *(record.name for record in self.discovery.records)):
            if (cls := self.class_of(name)) is not None:
                yield name, cls

    def spell(self, word: str) -> str:
        """Return the plugin's name that a word stands for: variables have underscores for hyphens."""
        if word in CORE or "_" not in word:
            return word
        return {name.replace("-", "_"): name for name in self.discovery.names}.get(word, word)

    def configured_by(self, config: object) -> str | None:
        """Return the section that a config object configures, by its class or a base class; else None."""
        classes = type(config).__mro__
        return next((name for name, cls in self.all() if cls in classes), None)


def load_class(record: Record) -> type | None:
    """Return the config class that a plugin's card names; None if the plugin has no options.

    Raises:
        PluginError: the plugin is broken, the class cannot be imported, or it is not made of options.
    """
    if record.fault:
        about = f"the plugin is {record.fault}: {record.detail}"
        raise PluginError(f"{about}\n`accel plugins doctor {record.name}` looks closer", plugin=record.name)
    if record.card is None or record.card.config is None:
        return None
    cls: type = load(record, record.card.config)
    guarded(record, f"configured by {record.card.config}", partial(options_of, cls))  # runs annotations
    return cls


def misspelt_variables(environment: Iterable[str]) -> Iterator[ConfigProblem]:
    """Report each variable with one underscore instead of two, such as ACCEL_MIXED_PRECISION."""
    ours = sorted(name for name in environment if name.upper().startswith("ACCEL_") and name[6:7] != "_")
    meant = {
        "_".join(path): "__".join(path)
        for section, cls in (CORE.items() if ours else ())
        for path in ([(section, key) for key in options_of(cls)] if cls else [(section,)])
    }
    for name in ours:
        rest = name[6:].lower()
        if "__" in rest or rest in meant:
            variable = f"ACCEL__{meant.get(rest.replace('__', '_'), rest).upper()}"
            origin = Origin("environment", f"variable {name}")
            yield ConfigProblem(origin, (), f"is never read; did you mean {variable}?")
