"""Pack all tensors of an operation into one run of bytes.

The plan is made once for equal calls.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

ALIGNMENT: Final = 16
"""Bytes; where a tensor of any dtype may begin."""
SMALL: Final = 2**14
"""Most elements, of all ranks, that are put in the order of the results.

Pieces of them have their shape already: a view of a leaf takes as long as the copy of it.
"""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> a dtype of that size that every device indexes."""
_split_copy: Final[Any] = torch.split_with_sizes_copy
"""Contiguous pieces in one call. Its stub forgets that it returns them."""


def digest(*agreed: Any) -> int:
    """Return 64 bits of values that must be equal on all ranks; never 0.

    `agreed`: strings, numbers, tuples of them.
    """
    data = marshal.dumps(agreed, 2)  # 2: without references, which depend on identity
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True) or 1


@lru_cache(maxsize=256)
def make_plan(
    operation: str,
    structure: tuple[Any, ...],
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    ranks: int,
) -> Plan:
    """Plan the bytes in which tensors of these shapes and dtypes travel."""
    members: dict[torch.dtype, list[int]] = {}
    for number, dtype in enumerate(dtypes):
        members.setdefault(dtype, []).append(number)
    groups, start = [], 0
    for dtype, numbers in members.items():
        sizes = [shapes[number].numel() for number in numbers]
        stop = start + sum(sizes) * dtype.itemsize
        groups.append(_Group(dtype, numbers, sizes, start, stop, {}))
        start = stop + -stop % ALIGNMENT
    agreed = (operation, structure, tuple(map(tuple, shapes)), tuple(map(str, dtypes)))
    rows = [(ranks * shape[0], *shape[1:]) if shape else (ranks,) for shape in shapes]
    return Plan(digest(*agreed), start, shapes, rows, groups)


class _Group(NamedTuple):
    """Tensors of one dtype: their numbers, sizes, and bytes.

    orders: device -> the order in which all ranks' elements make the results; made once each.
    """

    dtype: torch.dtype
    numbers: Sequence[int]
    sizes: list[int]
    start: int
    stop: int
    orders: dict[torch.device, Tensor]

    def results(self, table: Tensor) -> Sequence[Tensor]:
        """(ranks, elements) -> all ranks' elements of each member, apart."""
        ranks, elements = table.shape
        if len(self.sizes) == 1:  # what was received may be its result
            return [table.contiguous()]
        if ranks * elements > SMALL:
            return _split_copy(table, self.sizes, dim=1)  # type: ignore[no-any-return]
        order = self.orders.get(table.device)
        if order is None:
            numbers = torch.arange(ranks * elements, dtype=torch.int32, device=table.device)
            pieces = numbers.view(ranks, elements).split(self.sizes, dim=1)
            order = self.orders[table.device] = torch.cat([piece.reshape(-1) for piece in pieces])
        words = table.view(_WORDS.get(self.dtype.itemsize, self.dtype)).reshape(-1)
        ordered = words.index_select(0, order).view(self.dtype)
        return _split_copy(ordered, [ranks * size for size in self.sizes])  # type: ignore[no-any-return]


class Plan(NamedTuple):
    """Place of each tensor in the bytes, in an order that all ranks share."""

    digest: int
    size: int
    """Bytes."""
    shapes: Sequence[torch.Size]
    row_shapes: Sequence[tuple[int, ...]]
    groups: Sequence[_Group]

    def pack(self, tensors: Sequence[Tensor], into: Tensor) -> None:
        """Write the tensors into (size,) uint8."""
        for group in self.groups:
            chosen = [tensors[number] for number in group.numbers] if len(self.groups) > 1 else tensors
            flat = [tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in chosen]
            torch.cat(flat, out=_typed(into, group))

    def split(self, payload: Tensor) -> list[Tensor]:
        """(..., at least size) bytes -> one view per dtype, (..., elements)."""
        return [_typed(payload, group) for group in self.groups]

    def unflatten(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """One flat tensor per dtype -> views of the original shapes."""
        unpacked: list[Any] = [None] * len(self.shapes)
        for group, together in zip(self.groups, flat, strict=True):
            for number, piece in zip(group.numbers, together.split(group.sizes), strict=True):
                unpacked[number] = piece.view(self.shapes[number])
        return unpacked

    def rows(self, table: Tensor) -> list[Tensor]:
        """(ranks, size) bytes of every rank -> tensors (ranks * n, ...) of their own."""
        unpacked: list[Any] = [None] * len(self.shapes)
        for group, ranks in zip(self.groups, self.split(table), strict=True):
            for number, piece in zip(group.numbers, group.results(ranks), strict=True):
                shape = self.row_shapes[number]
                unpacked[number] = piece if piece.ndim == 1 == len(shape) else piece.view(shape)
        return unpacked


def _typed(payload: Tensor, group: _Group) -> Tensor:
    return payload.narrow(-1, group.start, group.stop - group.start).view(group.dtype)
