"""Curves of a record, in columns: a long run has a million values."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Curve", "Curves", "Point", "flat"]


class Point(NamedTuple):
    """A value of a curve.

    step: optimizer steps that were done. x: what it is drawn over, the program's own step if it gave one.
    """

    step: float
    x: float
    time: float
    value: float


class Curve:
    """Values over the steps, in the order of the record; 32 bytes each."""

    def __init__(self) -> None:
        self.steps, self.xs, self.times, self.values = (array("d") for _ in range(4))

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Point]:
        return map(Point, self.steps, self.xs, self.times, self.values)

    def __getitem__(self, at: int) -> Point:
        return Point(self.steps[at], self.xs[at], self.times[at], self.values[at])

    def add(self, point: Point) -> None:
        """Append a point."""
        for column, part in zip((self.steps, self.xs, self.times, self.values), point, strict=True):
            column.append(part)

    def until(self, step: float) -> Curve:
        """Return the points up to this step."""
        kept = Curve()
        for point in self:
            if point.step <= step:
                kept.add(point)
        return kept


class Curves(dict[str, Curve]):
    """Curves by name."""

    def put(self, name: str, line: Mapping[str, Any], x: Any, value: Any) -> None:
        """Add a value of a line of the record, if it is a number."""
        number, place = _number(value), _number(x)
        if number is not None:
            step = line["step"]
            if name not in self:
                self[name] = Curve()
            self[name].add(Point(step, step if place is None else place, line["time"], number))

    def cut(self, step: float) -> None:
        """Drop what comes after this step."""
        for name, curve in [*self.items()]:
            kept = curve.until(step)
            if len(kept):
                self[name] = kept
            else:
                del self[name]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (NAME/NAME, value) of nested values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _number(value: Any) -> float | None:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:  # an integer beyond all floats
        return math.inf if value > 0 else -math.inf
