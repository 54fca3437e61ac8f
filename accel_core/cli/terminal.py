"""Print for people: with rich on a terminal, in plain lines everywhere else."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

STYLES: Final = {
    "green": ("available", "ok", "yes", "usable"),
    "yellow": ("unavailable", "blocked", "not usable", "cannot be used"),
    "red": ("broken", "failed", "conflict", "incompatible", "damaged"),
}
"""Colour -> the words that have it."""
LEAST: Final = 24
"""Width of a last column that is still readable beside the others."""


def say(*lines: str, indent: int = 2) -> None:
    """Print lines; on a terminal they are wrapped at its width.

    A wrapped line continues `indent` columns further in.
    """
    console = _console() if _on_terminal() else None
    for line in lines:
        if console is None:
            print(line, flush=True)
            continue
        margin = " " * (len(line) - len(line.lstrip()) + indent)
        pieces = textwrap.wrap(line, console.width, subsequent_indent=margin, break_on_hyphens=False)
        console.print(_coloured("\n".join(pieces)))


def table(rows: Sequence[Sequence[str]], *, header: bool = True) -> Iterator[str]:
    """Yield the lines of a table.

    On a terminal the last column is wrapped, or stands below the others.

    header: the first row names the columns.
    """
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    leading = [
        "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False)) for row in rows
    ]
    if not _on_terminal():
        yield from (start + row[-1] for start, row in zip(leading, rows, strict=True))
        return
    from rich.padding import Padding
    from rich.table import Table

    grid, console = Table.grid(), _console()
    longest = max(len(row[-1]) for row in rows)
    is_narrow = len(leading[0]) + min(longest, LEAST) > console.width
    for number, (start, row) in enumerate(zip(leading, rows, strict=True)):
        style, last = "bold" if header and number == 0 else None, _coloured(row[-1])
        if is_narrow:
            grid.add_row(_coloured(start.rstrip()), style=style)
            grid.add_row(Padding(last, (0, 0, 0, 4)), style=style)
        else:
            grid.add_row(_coloured(start), last, style=style)
    with console.capture() as capture:
        console.print(grid)
    yield from capture.get().splitlines()


def _on_terminal() -> bool:
    # Python has no stdout where the shell closed it.
    return sys.stdout is not None and sys.stdout.isatty()


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if console.width < 1:  # COLUMNS=0, or a terminal that does not know its width
        console.width = 80
    return console


def _coloured(text: str) -> Any:
    """Return rich's text, in which words of `STYLES` have their colour.

    Markup in it has no meaning.
    """
    from rich.text import Text

    coloured = Text(text, overflow="fold")
    for colour, words in STYLES.items():
        coloured.highlight_regex(rf"(?<![\w-])({'|'.join(words)})(?![\w-])", colour)
    return coloured
