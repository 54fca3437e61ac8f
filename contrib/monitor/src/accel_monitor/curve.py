"""A small curve in characters of a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_monitor.columns import Curve

__all__ = ["braille", "over_steps", "spark"]

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of braille's dots, by column and row from the top."""
BARS = "▁▂▃▄▅▆▇█"


def spark(points: Curve, width: int) -> str:
    """Return one line of bars, each the mean of the finite values of its steps."""
    drawn = over_steps(points, width)
    if not drawn:
        return ""
    low, high = min(drawn), max(drawn)
    span = high - low or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in drawn)


def braille(values: Sequence[float], height: int) -> list[str]:
    """Return lines of braille, two values across and four dots down in each character.

    values: finite, one for each dot across.
    """
    cells = [[0] * ((len(values) + 1) // 2) for _ in range(height)]
    if not values:
        return [""] * height
    low, high = min(values), max(values)
    rows = [round((high - value) / ((high - low) or 1.0) * (4 * height - 1)) for value in values]
    before = rows[0]
    for column, row in enumerate(rows):
        for dot in range(min(row, before), max(row, before) + 1):
            cells[dot // 4][column // 2] |= DOTS[column % 2][dot % 4]
        before = row
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]


def over_steps(points: Curve, columns: int) -> list[float]:
    """Return a value for each column: the mean of the finite values of its steps.

    Columns are equally many steps wide. One without a value lies on the line between its neighbours.
    """
    finite = [point for point in points if math.isfinite(point.value)]
    if not finite:
        return []
    has_order = all(before.x <= after.x for before, after in pairwise(finite))
    places = [point.x if has_order else point.step for point in finite]  # a count of each epoch's begins anew
    first, span = places[0], (places[-1] - places[0]) or 1.0
    columns_of: dict[int, list[float]] = {}
    for place, point in zip(places, finite, strict=True):
        columns_of.setdefault(round((place - first) / span * (columns - 1)), []).append(point.value)
    known = [(column, math.fsum(values) / len(values)) for column, values in columns_of.items()]
    drawn = [known[0][1]]
    for (begin, low), (end, high) in pairwise(known):
        drawn += [low + (high - low) * step / (end - begin) for step in range(1, end - begin + 1)]
    return drawn + drawn[-1:] * (columns - len(drawn))
