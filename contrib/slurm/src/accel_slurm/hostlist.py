"""Slurm's short form of node names, as in `gpu[01-03,7],login`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

__all__ = ["expand"]


def expand(text: str) -> list[str]:
    """Return a host list's names, in order, as `scontrol show hostnames` does."""
    names: list[str] = []
    for entry in _split(text):
        parts = re.split(r"\[([^\]]*)\]", entry)  # text, ranges, text, ranges, ..., text
        choices = [list(_numbers(part)) if index % 2 else [part] for index, part in enumerate(parts)]
        names += map("".join, product(*choices))
    return names


def _split(text: str) -> Iterator[str]:
    """Yield the entries between commas that stand outside of brackets."""
    yield from filter(None, re.split(r",(?![^\[]*\])", text.strip()))


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
