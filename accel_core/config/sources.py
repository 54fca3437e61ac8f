"""What the sources of a config gave: environment, flags, Python and the launcher's handover.

Files are in `yamlfile`. Nothing is looked at here: values stay as they were given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, Final, Literal

from attrs import frozen

from accel_core.config.options import Path
from accel_core.errors import ConfigError

__all__ = [
    "HANDOVER_VARIABLE",
    "Given",
    "Keys",
    "Source",
    "Text",
    "from_environment",
    "from_flags",
    "from_launcher",
    "from_python",
]

HANDOVER_VARIABLE: Final = "ACCEL_LAUNCH_CONFIG"
PREFIX: Final = "ACCEL__"

NUMBER: Final = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")

Source = Literal["file", "environment", "flag", "python", "proposal"]


class Text(str):
    """A value from the environment or a flag: read by the type it is meant for."""

    __slots__ = ()

    def looks_like(self) -> Any:
        """The value that it would be in a YAML file."""
        import yaml

        if NUMBER.fullmatch(self) and "e" in self.lower():
            return float(self)  # YAML 1.1 takes 1e-4 for text
        try:
            value = yaml.safe_load(self)
        except yaml.YAMLError:
            return str(self)
        return str(self) if isinstance(value, str) and self[:1] not in "'\"" else value


class Keys(dict[str, Any]):
    """Keys and values that know where each was written."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[str, str] = {}


@frozen
class Given:
    """What a source gave for a path: the raw value of an option, or a whole section."""

    path: Path
    raw: Any
    source: Source
    origin: str

    def under(self, key: str, raw: Any) -> Given:
        """What it gave for a key within."""
        origin = self.raw.origins[key] if isinstance(self.raw, Keys) else self.origin
        return Given((*self.path, key), raw, self.source, origin)


def from_environment(environment: Mapping[str, str]) -> Iterator[Given]:
    """ACCEL__SECTION__KEY=text; `__` goes a level down, case does not matter, empty is not given."""
    for name, text in sorted(environment.items()):
        if name.upper().startswith(PREFIX) and text:
            path = tuple(name[len(PREFIX) :].lower().split("__"))
            yield Given(path, Text(text), "environment", f"variable {name}")


def from_flags(flags: Mapping[str, str]) -> Iterator[Given]:
    """Dotted path -> text; hyphens and underscores are one."""
    for flag, text in flags.items():
        path = tuple(flag.replace("-", "_").split("."))
        spelt = flag.removeprefix("launch.").replace("_", "-")
        yield Given(path, Text(text), "flag", f"flag --{spelt}")


def from_python(python: Mapping[str, object]) -> Iterator[Given]:
    """Arguments of `Accelerator(...)` by dotted path."""
    for dotted, value in python.items():
        path = tuple(dotted.split("."))
        yield Given(path, value, "python", f"Accelerator({path[-1]}=...)")


def from_launcher(name: str) -> tuple[str | None, list[Given]]:
    """The file that the launcher read, and what it hands over: each value keeps source and origin."""
    try:
        data = json.loads(FilePath(name).read_text(encoding="utf-8"))
        return data["file"], [Given(tuple(path), *rest) for path, *rest in data["settings"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{HANDOVER_VARIABLE} names {name}, which no launcher wrote ({type(error).__name__}: {error})\n"
            f"unset {HANDOVER_VARIABLE}; `accel launch` sets it for its workers only"
        ) from error
