"""Pass 1 of a config: the values of each source, with their origins.

The sources here are environment, flags, Python and a launcher; `yamlfile` reads files. Values stay as
they were given.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Final, Literal, NamedTuple

from accel_core.contract.options import Path
from accel_core.errors import ConfigError

WORKER_CONFIG_VARIABLE: Final = "ACCEL_LAUNCH_CONFIG"
"""Variable that names the file with a launcher's config for its workers."""
GUESSES_VARIABLE: Final = "ACCEL_LAUNCH_VARIABLES"
"""Variable with those that a launcher has set for plugins, as JSON.

The script has not chosen options then.
"""

_AMBIGUOUS: Final = re.compile(r"([-+]?)(0[\d_]+|0b[01_]+|0x[\da-f_]+|\d[\d_]*(?::[0-5]?\d)+(?:\.\d*)?)")


Source = Literal["preset", "file", "environment", "flag", "python", "proposal"]


class RawText(str):
    """Text of a variable or flag, whose meaning depends on the type of the option."""

    __slots__ = ()

    def parts(self) -> list[RawText]:
        """Split `a,b`, but not at commas within brackets: `layers.[0,2].*`."""
        parts, depth = [""], 0
        for letter in self:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and depth <= 0:
                parts.append("")
            else:
                parts[-1] += letter
        return [RawText(part.strip()) for part in parts if part.strip()]


def decimal(text: str) -> str:
    """Spell a number such as 010 or 1:30, which YAML 1.1 misreads, in decimal.

    YAML 1.1 reads them as 8 and 90. Empty for any other text.
    """
    match = _AMBIGUOUS.fullmatch(text.lower())
    if match is None:
        return ""
    sign, digits = match[1], match[2].replace("_", "")
    if ":" in digits:
        total = 0.0
        for part in digits.split(":"):
            total = 60 * total + float(part)
        return f"{sign}{total:.17g}"
    return sign + (str(int(digits, 0)) if digits[1:2] in "bx" else digits.lstrip("0") or "0")


class LocatedDict(dict[str, Any]):
    """A mapping of a file, with the place of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[str, str] = {}


class SourceValue(NamedTuple):
    """The value that a source gives for an option, or for a whole section."""

    path: Path
    value: Any
    source: Source
    origin: str
    """Place where the value was written, and the weaker value that it replaced."""


class ConfigProblem(NamedTuple):
    """One mistake: its place, its option, and a message."""

    origin: str
    path: Path
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, dotted(self.path), self.message) if part)

    @property
    def position(self) -> tuple[str, int, int]:
        """Sorting key: mistakes in files come first, from top to bottom."""
        match = re.fullmatch(r"(.*):(\d+):(\d+)", self.origin)
        return (match[1], int(match[2]), int(match[3])) if match else ("\uffff", 0, 0)


def raise_problems(problems: Iterable[ConfigProblem]) -> None:
    """Raise all problems as one ConfigError, in the order of the file, if any."""
    ordered = sorted(problems, key=lambda problem: problem.position)
    if ordered:
        lines = list(map(str, dict.fromkeys(ordered)))
        flags = any(problem.origin.startswith("flag ") for problem in ordered)
        again = "launch --dry-run` with these flags" if flags else "config check`"
        message = "\n".join([*lines, f"correct this; `accel {again} looks again without training"])
        raise ConfigError(message, problems=lines)


def dotted(path: Path) -> str:
    """Return a path as users write it."""
    return ".".join(path)


def from_presets(presets: Mapping[str, tuple[object, str]]) -> Iterator[SourceValue]:
    """Values of dotted path -> (value, origin), the weakest source."""
    for path, (value, origin) in presets.items():
        yield SourceValue(tuple(path.split(".")), value, "preset", origin)


def from_environment(environment: Mapping[str, str]) -> Iterator[SourceValue]:
    """Values of ACCEL__SECTION__KEY=text, in any case; empty text is left out."""
    for name, text in sorted(environment.items()):
        head, *path = name.upper().split("__")
        if head == "ACCEL" and path and text:
            lowered = tuple(part.lower() for part in path)
            yield SourceValue(lowered, RawText(text), "environment", f"variable {name}")


def from_flags(flags: Iterable[tuple[str, str]]) -> Iterator[SourceValue]:
    """Values of (dotted path, text); hyphens and underscores are equal."""
    for flag, text in flags:
        spelling = flag.removeprefix("launch.").replace("_", "-")
        path = tuple(flag.replace("-", "_").split("."))
        yield SourceValue(path, RawText(text), "flag", f"flag --{spelling}")


def from_python(python: Mapping[str, object], objects: Sequence[object]) -> Iterator[SourceValue]:
    """Arguments of `Accelerator(...)` by dotted path, and config objects."""
    for name, value in python.items():
        path = tuple(name.split("."))
        argument = "strategies" if path[0] == "strategies" else path[-1]
        yield SourceValue(path, value, "python", f"Accelerator({argument}=...)")
    for config in objects:
        origin = config.__name__ if isinstance(config, type) else f"{type(config).__name__}(...)"
        yield SourceValue((), config, "python", origin)


def fingerprints(environment: Mapping[str, str]) -> dict[str, str]:
    """Short hashes of the variables ACCEL__..., to detect later changes."""
    names = (name for name in environment if name.upper().startswith("ACCEL__"))
    return {name: hashlib.blake2b(environment[name].encode(), digest_size=8).hexdigest() for name in names}


def from_launcher(file: str, environment: Mapping[str, str]) -> tuple[str | None, list[SourceValue]]:
    """Return the name of the launcher's file, and its merged config's values.

    Variables that were set or changed since, by the script for instance, are read anew.
    """
    try:
        data = json.loads(FilePath(file).read_text(encoding="utf-8"))
        values = [SourceValue(tuple(path), *rest) for path, *rest in data["settings"]]
        before, now = data["variables"], fingerprints(environment)
        changed = {name: environment[name] for name in now if before.get(name) != now[name]}
        values = [v for v in values if v.source != "environment" or v.origin.split()[1] not in changed]
        flags = [value for value in values if value.source == "flag"]
        rest = [value for value in values if value.source != "flag"]
        return data["file"], [*rest, *from_environment(changed), *flags]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{WORKER_CONFIG_VARIABLE} names {file}, which no launcher wrote"
            f" ({type(error).__name__}: {error})\n"
            f"unset {WORKER_CONFIG_VARIABLE}; `accel launch` sets it for its workers only"
        ) from error
