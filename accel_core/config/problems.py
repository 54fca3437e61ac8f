"""Mistakes in a config: collected, put in the order of the file, and raised as one error."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from accel_core.config.options import Path
from accel_core.errors import ConfigError

__all__ = ["Problem", "raise_if_any", "show", "spell"]


@frozen
class Problem:
    """One mistake: where, which option, what is wrong."""

    origin: str
    path: Path
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, spell(self.path), self.message) if part)


def spell(path: Path) -> str:
    """A path as people write it."""
    return ".".join(path)


def show(raw: Any) -> str:
    """A value as its user wrote it."""
    if isinstance(raw, (Mapping, list, tuple)):
        return "a mapping" if isinstance(raw, Mapping) else "a list"
    return json.dumps(raw) if raw is None or isinstance(raw, bool) else repr(raw)


def raise_if_any(problems: Sequence[Problem]) -> None:
    """Raise a ConfigError with a line for each problem, if there are any."""
    if problems:
        lines = [str(problem) for problem in dict.fromkeys(sorted(problems, key=_position))]
        message = "\n".join([*lines, "correct this; `accel config check` looks again without training"])
        raise ConfigError(message, problems=lines)


def _position(problem: Problem) -> tuple[str, int, int]:
    found = re.fullmatch(r"(.*):(\d+):(\d+)", problem.origin)
    return (found[1], int(found[2]), int(found[3])) if found else ("\uffff", 0, 0)
