"""Pack all tensors of an operation into contiguous bytes, by a plan that equal calls share."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

ALIGNMENT: Final = 16
"""Bytes; a tensor of any dtype may begin at a multiple."""
SMALL: Final = 2**14
"""Most elements, of all ranks, that one `index_select` puts in the order of the results.

One-dimensional results then need no view, which takes as long as a copy of so few elements.
"""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> a dtype of this size that every device can index."""
_split_copy: Final[Any] = torch.split_with_sizes_copy
"""Returns contiguous pieces in one call; torch's stub declares None."""


def digest(*agreed: Any) -> int:
    """Return a 64-bit digest of values that must be equal on all ranks; never 0.

    Args:
        agreed: strings, numbers, or tuples of strings and numbers.
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
    """Plan the layout in bytes of tensors of these shapes and dtypes."""
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
    """The tensors of one dtype, and their place in the bytes of a plan."""

    dtype: torch.dtype
    numbers: Sequence[int]
    """Positions of the tensors in the plan's order."""
    sizes: list[int]
    """Elements of each tensor."""
    start: int
    stop: int
    """The group's bytes are start:stop."""
    orders: dict[torch.device, Tensor]
    """Device -> indices that put the elements of all ranks in the order of the results; a cache."""

    def results(self, table: Tensor) -> Sequence[Tensor]:
        """Split (ranks, elements) into all ranks' elements of each tensor."""
        ranks, elements = table.shape
        if len(self.sizes) == 1:  # the received memory may be the result
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
    """Place of each tensor in the bytes of an operation, in an order that all ranks share."""

    digest: int
    """`digest` of the operation, structure, shapes and dtypes."""
    size: int
    """Bytes."""
    shapes: Sequence[torch.Size]
    row_shapes: Sequence[tuple[int, ...]]
    """Shapes of the concatenation over all ranks, (ranks * n, ...)."""
    groups: Sequence[_Group]

    def pack(self, tensors: Sequence[Tensor], into: Tensor) -> None:
        """Write the tensors into (size,) uint8."""
        for group in self.groups:
            chosen = [tensors[number] for number in group.numbers] if len(self.groups) > 1 else tensors
            flat = [tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in chosen]
            torch.cat(flat, out=_typed(into, group))

    def split(self, payload: Tensor) -> list[Tensor]:
        """Return one view (..., elements) per dtype of (..., at least size) bytes."""
        return [_typed(payload, group) for group in self.groups]

    def unflatten(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """Return views of the original shapes into one flat tensor per dtype."""
        unpacked: list[Any] = [None] * len(self.shapes)
        for group, together in zip(self.groups, flat, strict=True):
            for number, piece in zip(group.numbers, together.split(group.sizes), strict=True):
                unpacked[number] = piece.view(self.shapes[number])
        return unpacked

    def rows(self, table: Tensor) -> list[Tensor]:
        """Return the tensors (ranks * n, ...) that the (ranks, size) bytes of every rank hold."""
        unpacked: list[Any] = [None] * len(self.shapes)
        for group, ranks in zip(self.groups, self.split(table), strict=True):
            for number, piece in zip(group.numbers, group.results(ranks), strict=True):
                shape = self.row_shapes[number]
                unpacked[number] = piece if piece.ndim == 1 == len(shape) else piece.view(shape)
        return unpacked


def _typed(payload: Tensor, group: _Group) -> Tensor:
    return payload.narrow(-1, group.start, group.stop - group.start).view(group.dtype)
