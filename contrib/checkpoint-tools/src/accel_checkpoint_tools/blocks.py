"""Blocks of a tensor: parts that fit into memory and lie in one piece in any box."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Final

__all__ = ["BLOCK_ELEMENTS", "Part", "blocks", "common"]

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangular part of a tensor: (offset, shape)."""

BLOCK_ELEMENTS: Final = 1 << 17
"""Largest number of elements of a block: 1 MiB as float64.

A processor's cache holds some of these.
"""


def blocks(shape: tuple[int, ...]) -> Iterator[Part]:
    """Yield the parts that make up a tensor of `shape`, in row-major order.

    Each has one index in its first dimensions, a range in the next, and all of the others. So the part of
    it that lies in any rectangular box is contiguous there, whatever the box is.
    """
    if not math.prod(shape):
        return
    dim = next((dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= BLOCK_ELEMENTS), 0)
    if not shape:
        yield (), ()
        return
    rest = shape[dim + 1 :]
    rows = max(1, BLOCK_ELEMENTS // math.prod(rest))
    for lead in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], rows):
            count = min(rows, shape[dim] - start)
            yield (*lead, start, *(0,) * len(rest)), (*(1,) * dim, count, *rest)


def common(one: Part, other: Part) -> Part | None:
    """Return the part that both have, if it has any element."""
    first = tuple(map(max, one[0], other[0]))
    ends = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
    shape = tuple(end - start for start, end in zip(first, ends, strict=True))
    return (first, shape) if min(shape, default=1) > 0 else None
