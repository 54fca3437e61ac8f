"""The sources of a config: presets, environment, flags, Python and a launcher; `yamlfile` reads files.

Each source yields settings, whose values stay as they were written. The weakest source comes first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from accel_core.contract.options import Path
from accel_core.errors import ConfigError

WORKER_CONFIG_VARIABLE: Final = "ACCEL_LAUNCH_CONFIG"
"""Variable with a launcher's config for its workers, as JSON."""
GUESSES_VARIABLE: Final = "ACCEL_LAUNCH_VARIABLES"
"""Variable with the variables that a launcher has set for plugins, as JSON.

Their values are guesses: the script has not chosen its options yet.
"""

Source = Literal["preset", "file", "environment", "flag", "python", "proposal"]


class RawText(str):
    """Text without quotes, from a file or a shell: the type of its option decides how it is read."""

    __slots__ = ()


class Origin(NamedTuple):
    """The place of a value in its source."""

    source: Source
    place: str
    """A file, or words for people, such as `flag --device`."""
    line: int = 0
    """Line in the file, from 1; 0: not in a file."""
    column: int = 0
    over: str = ""
    """The weaker value that this value replaced, and its origin, for people."""

    def __str__(self) -> str:
        place = f"{self.place}:{self.line}:{self.column}" if self.line else self.place
        return f"{place} (over {self.over})" if self.over else place


class Setting(NamedTuple):
    """A value for an option, or for a whole section, and its origin."""

    path: Path
    value: Any
    origin: Origin


class ConfigProblem(NamedTuple):
    """One mistake: its origin, its option, and a message."""

    origin: Origin | None
    path: Path
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.origin or ""), dotted(self.path), self.message) if part)

    @property
    def position(self) -> tuple[str, int, int]:
        """Sorting key: mistakes in files come first, from top to bottom."""
        origin = self.origin
        return (origin.place, origin.line, origin.column) if origin and origin.line else ("\uffff", 0, 0)


def raise_problems(problems: Iterable[ConfigProblem]) -> None:
    """Raise all problems, if there are any, as one ConfigError, in the order of the file."""
    ordered = sorted(problems, key=lambda problem: problem.position)
    if ordered:
        lines = list(map(str, dict.fromkeys(ordered)))
        remedy = "correct this; `accel config check` looks again without training"
        raise ConfigError("\n".join([*lines, remedy]), problems=lines)


def dotted(path: Path) -> str:
    """Return a path as users write it, such as `launch.nodes`."""
    return ".".join(path)


def from_presets(presets: Mapping[str, tuple[object, str]]) -> Iterator[Setting]:
    """Yield the settings of dotted path -> (value, origin), the weakest source."""
    for path, (value, origin) in presets.items():
        yield Setting(tuple(path.split(".")), value, Origin("preset", origin))


def from_environment(environment: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the settings of variables ACCEL__SECTION__KEY, in any case; empty variables are skipped."""
    for name, text in sorted(environment.items()):
        if name.upper().startswith("ACCEL__") and text:
            path = tuple(name.lower().split("__")[1:])
            yield Setting(path, RawText(text), Origin("environment", f"variable {name}"))


def from_flags(flags: Iterable[tuple[str, str]]) -> Iterator[Setting]:
    """Yield the settings of (dotted path, text); hyphens and underscores are equal."""
    for flag, text in flags:
        spelling = flag.removeprefix("launch.").replace("_", "-")
        path = tuple(flag.replace("-", "_").split("."))
        yield Setting(path, RawText(text), Origin("flag", f"flag --{spelling}"))


def from_python(python: Mapping[str, object], objects: Sequence[object]) -> Iterator[Setting]:
    """Yield the settings of dotted path -> argument of `Accelerator`, and config objects without a path."""
    for name, value in python.items():
        path = tuple(name.split("."))
        argument = {"strategies": "strategies", "parallelism": "parallelism_config"}.get(path[0], path[-1])
        yield Setting(path, value, Origin("python", f"Accelerator({argument}=...)"))
    for config in objects:
        yield Setting((), config, Origin("python", f"{type(config).__name__}(...)"))


def from_launcher(text: str) -> tuple[str | None, list[Setting]]:
    """Return the name of the file that the launcher read, and the settings of its merged config."""
    data = json.loads(text)
    return data["file"], [
        Setting(tuple(path), value, Origin(*origin)) for path, value, origin in data["settings"]
    ]
