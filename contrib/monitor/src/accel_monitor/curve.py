"""A small curve in characters of a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["curve", "means", "spark"]

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of braille's dots, by column and row from the top."""
BARS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], width: int) -> str:
    """Return one line of bars, each the mean of its stretch of the finite values."""
    drawn = means([value for value in values if math.isfinite(value)], width)
    if not drawn:
        return ""
    low, high = min(drawn), max(drawn)
    span = high - low or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in drawn)


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return lines of braille, two dots across and four down in each character.

    The values are finite, and at most as many as dots across (see `means`).
    """
    cells = [[0] * width for _ in range(height)]
    if not values:
        return [" " * width] * height
    low, high = min(values), max(values)
    rows = [round((high - value) / ((high - low) or 1.0) * (4 * height - 1)) for value in values]
    wide = 2 * width - 1
    before = rows[0]
    for column in range(2 * width):
        row = rows[round(column / wide * (len(rows) - 1))]
        for dot in range(min(row, before), max(row, before) + 1):
            cells[dot // 4][column // 2] |= DOTS[column % 2][dot % 4]
        before = row
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]


def means(values: Sequence[float], most: int) -> list[float]:
    """Return the values or, of more than `most`, the means of as many stretches."""
    if len(values) <= most:
        return list(values)
    ends = [round(at * len(values) / most) for at in range(most + 1)]
    return [math.fsum(values[begin:end]) / (end - begin) for begin, end in pairwise(ends)]
