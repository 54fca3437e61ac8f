"""Tables, sizes and ages as text."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import click

__all__ = ["age", "in_order", "show", "size", "table"]

_TIMES: Final = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_SIZES: Final = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))


def age(seconds: float) -> str:
    """Return a time as text, in its largest unit."""
    unit, least = _unit(seconds, _TIMES)
    return f"{seconds / least:.0f} {unit}"


def size(count: float) -> str:
    """Return a number of bytes as text, in its largest unit."""
    unit, least = _unit(count, _SIZES)
    return f"{count / least:.3g} {unit}"


def _unit(value: float, scale: Sequence[tuple[str, float]]) -> tuple[str, float]:
    return next((each for each in scale if value >= each[1]), scale[-1])


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def show(lines: Iterable[str]) -> None:
    """Print lines, what would move the cursor in names as escapes.

    A reader that has read enough, such as `head`, is not an error.
    """
    text = "\n".join(
        "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)
        for line in lines
    )
    try:
        click.echo(text)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def in_order(name: str) -> list[tuple[bool, int, str]]:
    """Return what to sort names by: their words, of which numbers count as numbers."""
    words = re.split("[./]", name)
    return [(word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in words]
