"""The sources of a config as layers: environment, flags and Python. Files are in `yamlfile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from accel_core.config.reader import CORE, Layer, Problem, Reader
from accel_core.config.structure import Path, Text, leaves, section_class

__all__ = ["environment_layer", "flag_layer", "python_layers"]

PREFIX: Final = "ACCEL__"


def environment_layer(environment: Mapping[str, str]) -> Layer:
    """ACCEL__SECTION__KEY=text; `__` goes a level down, case does not matter, empty is not given."""
    names = {}
    for name in sorted(environment):
        if name.upper().startswith(PREFIX) and environment[name]:
            names[tuple(name[len(PREFIX) :].lower().split("__"))] = name
    entries = [(path, Text(environment[name])) for path, name in names.items()]
    return Layer("environment", entries, lambda path: f"variable {_nearest(names, path)}")


def flag_layer(flags: Mapping[str, str]) -> Layer:
    """Dotted path -> text; hyphens and underscores are one."""
    names = {tuple(flag.replace("-", "_").split(".")): flag for flag in flags}
    entries = [(path, Text(flags[flag])) for path, flag in names.items()]
    return Layer("flag", entries, lambda path: f"flag {_flag(_nearest(names, path))}")


def _flag(path: str) -> str:
    return "--" + path.removeprefix("launch.").replace("_", "-")


def _nearest(names: Mapping[Path, str], path: Path) -> str:
    # A plugin's name may have hyphens that a variable cannot; a variable may hold a whole section,
    # or reach deeper than there are options.
    spelt = tuple(part.replace("-", "_") for part in path)
    above = (names[spelt[:depth]] for depth in range(len(spelt), -1, -1) if spelt[:depth] in names)
    below = (name for place, name in names.items() if place[: len(spelt)] == spelt)
    return next(above, None) or next(below)


def python_layers(
    python: Mapping[str, object], objects: Sequence[object], reader: Reader, bases: dict[Path, object]
) -> Iterator[Layer]:
    """What `Accelerator(...)` was given: arguments by path, then config objects by their class.

    An option that an object leaves at its default counts as not given. `bases` collects the objects
    by section, so that a run holds the very object it was given.
    """
    plain = {tuple(path.split(".")): value for path, value in python.items()}
    named = plain.pop(("strategies",), None) or {}
    yield Layer("python", list(plain.items()), lambda path: f"Accelerator({path[-1]}=...)")
    for item in objects:
        section = _section_of(item, reader)
        if section is None:
            reader.problems.append(_stranger(item, reader))
        elif (section,) in bases:
            reader.problems.append(_twice(item, section))
        else:
            bases[(section,)] = item
            yield _object_layer(item, (section,))
    for alias, given in named.items() if isinstance(named, Mapping) else ():
        yield _named_layer(alias, given, reader, bases)


def _object_layer(item: object, path: Path, plugin: str | None = None) -> Layer:
    head = [((*path, "plugin"), plugin)] if plugin else []
    return Layer(
        "python", [*head, *leaves(item, path, changed=True)], lambda _: f"{type(item).__name__}(...)"
    )


def _named_layer(alias: str, given: Any, reader: Reader, bases: dict[Path, object]) -> Layer:
    path = ("strategies", alias)
    plugin = _section_of(given, reader)
    if plugin is None:
        return Layer("python", [(path, given)], lambda _: "Accelerator(strategies=...)")
    bases[path] = given
    return _object_layer(given, path, plugin)


def _section_of(item: object, reader: Reader) -> str | None:
    """The section whose class the object is of, the closest class first."""
    if not attrs.has(type(item)):
        return None
    homes: dict[type, str] = {cls: name for name, kind in CORE.items() if (cls := section_class(kind))}
    found = next((homes[cls] for cls in type(item).__mro__ if cls in homes), None)
    if found:
        return found
    for record in reader.discovery.records:
        if (cls := reader.options_class(record.name)) is not None:
            homes[cls] = record.name
    return next((homes[cls] for cls in type(item).__mro__ if cls in homes), None)


def _stranger(item: object, reader: Reader) -> Problem:
    classes = [section_class(kind) for kind in CORE.values()]
    classes += [reader.options_class(record.name) for record in reader.discovery.records]
    known = ", ".join(sorted({cls.__name__ for cls in classes if cls}))
    name = type(item).__name__
    return Problem(
        f"Accelerator({name})", (), f"configures nothing that is installed; what can be given: {known}"
    )


def _twice(item: object, section: str) -> Problem:
    return Problem(
        f"Accelerator({type(item).__name__})", (), f"a second object for section {section}; give one"
    )
