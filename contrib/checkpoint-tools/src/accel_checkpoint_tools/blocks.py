"""Blocks of a tensor: parts that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Final

from accel_core import Box

__all__ = ["BLOCK_ELEMENTS", "blocks"]

BLOCK_ELEMENTS: Final = 1 << 20
"""Largest number of elements of a block: 8 MiB as float64."""


def blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield the parts that make up a tensor of `shape`, in row-major order.

    Each has one index in its first dimensions, a range in the next, and all of the others.
    """
    if not math.prod(shape):
        return
    dim = next((dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= BLOCK_ELEMENTS), 0)
    if not shape:
        yield Box((), ())
        return
    rest = shape[dim + 1 :]
    rows = max(1, BLOCK_ELEMENTS // math.prod(rest))
    for lead in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], rows):
            count = min(rows, shape[dim] - start)
            yield Box((*lead, start, *(0,) * len(rest)), (*(1,) * dim, count, *rest))
