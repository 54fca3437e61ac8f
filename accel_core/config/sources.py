"""What the sources of a config gave: environment, flags, Python and the launcher's handover.

Files are in `yamlfile`. Nothing is looked at here: values stay as they were given.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Final, Literal

from attrs import frozen

from accel_core.contract.options import Path
from accel_core.errors import ConfigError

__all__ = [
    "HANDOVER_VARIABLE",
    "Given",
    "Keys",
    "Problem",
    "Text",
    "decimal",
    "fingerprints",
    "show",
    "spell",
]

HANDOVER_VARIABLE: Final = "ACCEL_LAUNCH_CONFIG"

_UNCLEAR: Final = re.compile(r"([-+]?)(0[\d_]+|0b[01_]+|0x[\da-f_]+|\d[\d_]*(?::[0-5]?\d)+(?:\.\d*)?)")

Source = Literal["preset", "file", "environment", "flag", "python", "proposal"]


class Text(str):
    """A value from the environment or a flag: read by the type it is meant for."""

    __slots__ = ()

    def parts(self) -> list[Text]:
        """The items of `a,b`. A comma within brackets divides nothing: `layers.[0,2].*` is one pattern."""
        found, depth = [""], 0
        for letter in self:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and depth <= 0:
                found.append("")
            else:
                found[-1] += letter
        return [Text(part.strip()) for part in found if part.strip()]


def decimal(text: str) -> str:
    """The plain spelling of a number that YAML 1.1 reads its own way (010 is 8 there, 1:30 is 90).

    Empty for any other text.
    """
    found = _UNCLEAR.fullmatch(text.lower())
    if found is None:
        return ""
    sign, digits = found[1], found[2].replace("_", "")
    if ":" in digits:
        total = 0.0
        for part in digits.split(":"):
            total = 60 * total + float(part)
        return f"{sign}{total:.17g}"
    return sign + (str(int(digits, 0)) if digits[1:2] in "bx" else digits.lstrip("0") or "0")


class Keys(dict[str, Any]):
    """Keys and values that know where each was written."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[str, str] = {}


@frozen
class Given:
    """What a source gave for a path: the value of an option, or a whole section."""

    path: Path
    value: Any
    source: Source
    origin: str
    """Where it was written, and what it won over."""

    def under(self, key: str, value: Any) -> Given:
        """What it gave for a key within."""
        origin = self.value.origins[key] if isinstance(self.value, Keys) else self.origin
        return Given((*self.path, key), value, self.source, origin)


@frozen
class Problem:
    """One mistake: where, which option, what is wrong."""

    origin: str
    path: Path
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, spell(self.path), self.message) if part)

    @property
    def position(self) -> tuple[str, int, int]:
        """To sort by: what stands in files first, from top to bottom."""
        found = re.fullmatch(r"(.*):(\d+):(\d+)", self.origin)
        return (found[1], int(found[2]), int(found[3])) if found else ("\uffff", 0, 0)


def spell(path: Path) -> str:
    """A path as people write it."""
    return ".".join(path)


def from_presets(presets: Mapping[str, tuple[object, str]]) -> Iterator[Given]:
    """Dotted path -> (value, who says so): what counts where no other source says anything."""
    for dotted, (value, origin) in presets.items():
        yield Given(tuple(dotted.split(".")), value, "preset", origin)


def from_environment(environment: Mapping[str, str]) -> Iterator[Given]:
    """ACCEL__SECTION__KEY=text; `__` goes a level down, case does not matter, empty is not given."""
    for name, text in sorted(environment.items()):
        head, *path = name.upper().split("__")
        if head == "ACCEL" and path and text:
            yield Given(tuple(part.lower() for part in path), Text(text), "environment", f"variable {name}")


def from_flags(flags: Mapping[str, str]) -> Iterator[Given]:
    """Dotted path -> text; hyphens and underscores are one."""
    for flag, text in flags.items():
        spelt = flag.removeprefix("launch.").replace("_", "-")
        yield Given(tuple(flag.replace("-", "_").split(".")), Text(text), "flag", f"flag --{spelt}")


def from_python(python: Mapping[str, object], objects: Sequence[object]) -> Iterator[Given]:
    """Arguments of `Accelerator(...)` by dotted path, and config objects, whose classes are their paths."""
    for dotted, value in python.items():
        path = tuple(dotted.split("."))
        yield Given(path, value, "python", f"Accelerator({path[-1]}=...)")
    for item in objects:
        yield Given((), item, "python", f"{type(item).__name__}(...)")


def fingerprints(environment: Mapping[str, str]) -> dict[str, str]:
    """Variable of ours -> a short hash of its text, to tell later whether it was changed."""
    ours = (name for name in environment if name.upper().startswith("ACCEL__"))
    return {name: hashlib.blake2b(environment[name].encode(), digest_size=8).hexdigest() for name in ours}


def from_launcher(name: str, environment: Mapping[str, str]) -> tuple[str | None, list[Given]]:
    """The file that the launcher read, and what it hands over: each value keeps source and origin.

    Variables that were set or changed since, by the script for instance, are read anew.
    """
    try:
        data = json.loads(FilePath(name).read_text(encoding="utf-8"))
        rows = [Given(tuple(path), *rest) for path, *rest in data["settings"]]
        before, now = data["variables"], fingerprints(environment)
        news = {name: environment[name] for name in now if before.get(name) != now[name]}
        rows = [row for row in rows if not (row.source == "environment" and row.origin.split()[1] in news)]
        flags = [row for row in rows if row.source == "flag"]
        return data["file"], [*(row for row in rows if row not in flags), *from_environment(news), *flags]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{HANDOVER_VARIABLE} names {name}, which no launcher wrote ({type(error).__name__}: {error})\n"
            f"unset {HANDOVER_VARIABLE}; `accel launch` sets it for its workers only"
        ) from error


def show(raw: Any) -> str:
    """A value as its user wrote it."""
    if isinstance(raw, (Mapping, list, tuple)):
        return "a mapping" if isinstance(raw, Mapping) else "a list"
    return json.dumps(raw) if raw is None or isinstance(raw, bool) else repr(raw)
