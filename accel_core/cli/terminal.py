"""Print for people: on a terminal wrapped at its width and coloured, elsewhere in plain lines."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Final

import click

COLOURS: Final = {
    **dict.fromkeys(("available", "ok", "yes", "usable"), "green"),
    **dict.fromkeys(("unavailable", "blocked", "not usable", "cannot be used"), "yellow"),
    **dict.fromkeys(("broken", "failed", "conflict", "incompatible", "damaged"), "red"),
}
"""Word -> its colour."""
LEAST: Final = 24
"""Least width of the last column; if the terminal has no room for it, it is printed below the others."""


def say(*lines: str, indent: int = 2, bold: bool = False) -> None:
    """Print lines; on a terminal they are wrapped at its width.

    A wrapped line continues `indent` columns further in.
    """
    width = _width()
    for line in lines:
        margin = " " * (len(line) - len(line.lstrip()) + indent)
        if width:
            text = textwrap.fill(line, width, subsequent_indent=margin, break_on_hyphens=False)
            print(text if "NO_COLOR" in os.environ else _styled(text, bold))
        else:
            print(line, flush=True)


def print_table(rows: Sequence[Sequence[str]], *, header: bool = True) -> None:
    """Print a table. On a terminal the last column is wrapped, or printed below the others.

    Args:
        rows: the cells of each row.
        header: the first row names the columns.
    """
    widths = [max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:-1]]
    least = sum(widths) + min(LEAST, max(len(row[-1]) for row in rows))
    for number, (*cells, last) in enumerate(rows):
        start = "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        bold = header and number == 0
        if 0 < _width() < least:
            say(start.rstrip(), bold=bold)
            say(f"    {last}", indent=0, bold=bold)
        else:
            say(start + last, indent=len(start), bold=bold)


def _width() -> int:
    """Return the columns of the terminal; 0 if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _styled(text: str, bold: bool) -> str:
    """Return the text in bold, or with the words of COLOURS coloured."""
    if bold:
        return click.style(text, bold=True)
    words = rf"(?<![\w-])({'|'.join(COLOURS)})(?![\w-])"
    return re.sub(words, lambda found: click.style(found[0], fg=COLOURS[found[0]]), text)
