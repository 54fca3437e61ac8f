"""Map of a megatron-core tensor's rows to boxes in the user's weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from accel_core import flat_range

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Part", "Piece", "boxes", "column", "gated", "heads", "row", "same", "vocabulary"]

Part = tuple[int, int]
"""Return (this rank's number, number of ranks) in the group that splits a layer."""
Shard = tuple[tuple[int, ...], "Tensor"]


@frozen(kw_only=True)
class Piece:
    """A box of a user's weight, held by consecutive rows of a tensor here.

    Rows `first`, `first + 1`, ... are the box at `offset` of the weight `name`.

    shape: of the whole weight. Both as megatron-core lays weights out; `transposed`: the user's model
    has it the other way round.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    first: int = 0
    rows: int
    transposed: bool = False

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The weight's shape in the user's model."""
        return self.shape[::-1] if self.transposed else self.shape


def same(name: str, tensor: Tensor) -> Piece:
    """All of a weight, on each rank."""
    shape = tuple(tensor.shape)
    return Piece(name=name, shape=shape, offset=(0,) * len(shape), rows=shape[0] if shape else 1)


def column(name: str, tensor: Tensor, part: Part) -> Piece:
    """Return an even part of the rows.

    These are megatron-core's column-parallel layers, whose weights are (out, in).
    """
    (rank, ranks), (rows, *rest) = part, tensor.shape
    return Piece(name=name, shape=(rows * ranks, *rest), offset=(rows * rank, *(0 for _ in rest)), rows=rows)


def row(name: str, tensor: Tensor, part: Part) -> Piece:
    """Return an even part of the columns."""
    (rank, ranks), (rows, columns) = part, tensor.shape
    return Piece(name=name, shape=(rows, columns * ranks), offset=(0, columns * rank), rows=rows)


def vocabulary(name: str, tensor: Tensor, part: Part, size: int) -> Piece:
    """Return an even part of a vocabulary's rows, padded at its end."""
    (rank, _), (rows, *rest) = part, tensor.shape
    held = max(0, min(rows, size - rows * rank))
    return Piece(
        name=name, shape=(size, *rest), offset=(min(size, rows * rank), *(0 for _ in rest)), rows=held
    )


def gated(names: Sequence[str], tensor: Tensor, part: Part) -> list[Piece]:
    """Parts of two weights, one above the other."""
    half = tensor.shape[0] // len(names)
    return [
        evolve(column(name, tensor[:half], part), first=half * number) for number, name in enumerate(names)
    ]


def heads(names: Sequence[str], tensor: Tensor, part: Part, *, groups: int, queries: int) -> list[Piece]:
    """Query, key and value rows of attention, laid out group by group.

    names: of the three weights, or of one that has them one above the other. groups: of all ranks, each
    of `queries` heads that share a key and a value.
    """
    (rank, ranks), (rows, *rest) = part, tensor.shape
    mine = groups // ranks
    head = rows // (mine * (queries + 2))
    counts = (queries, 1, 1)
    totals = [groups * count * head for count in counts]
    starts = [0, totals[0], totals[0] + totals[1]] if len(names) == 1 else [0, 0, 0]
    found = []
    for group in range(mine):
        first = group * (queries + 2) * head
        for number, count in enumerate(counts):
            at = starts[number] + (rank * mine + group) * count * head
            found.append(
                Piece(
                    name=names[number % len(names)],
                    shape=(sum(totals) if len(names) == 1 else totals[number], *rest),
                    offset=(at, *(0 for _ in rest)),
                    first=first,
                    rows=count * head,
                )
            )
            first += count * head
    return found


def boxes(piece: Piece, elements: Tensor, begin: int, shape: Sequence[int]) -> Iterator[Shard]:
    """(offset in the user's weight, view) of the piece's part of `elements`.

    Both are in the user's orientation.

    `elements` begin at number `begin` of a flattened tensor of `shape`.
    """
    if not shape:
        yield from [((), elements.view(()))] if elements.numel() else ()
        return
    rest = tuple(shape[1:])
    width = math.prod(rest)
    top = piece.first * width
    start, end = max(top, begin), min(top + piece.rows * width, begin + elements.numel())
    if start >= end:
        return
    inside: Any = flat_range(elements[start - begin : end - begin], (piece.rows, *rest), start - top)
    for at, data in inside.shards:
        offset = tuple(a + b for a, b in zip(piece.offset, at, strict=True))
        yield (offset[::-1], data.t()) if piece.transposed else (offset, data)
