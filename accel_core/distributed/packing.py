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
        groups.append(_Group(dtype, numbers, sizes, start, stop))
        start = stop + -stop % ALIGNMENT
    agreed = (operation, structure, tuple(map(tuple, shapes)), tuple(map(str, dtypes)))
    rows = [(ranks * shape[0], *shape[1:]) if shape else (ranks,) for shape in shapes]
    return Plan(digest(*agreed), start, shapes, rows, groups)


class _Group(NamedTuple):
    """Tensors of one dtype: their numbers, sizes, and bytes."""

    dtype: torch.dtype
    numbers: Sequence[int]
    sizes: list[int]
    start: int
    stop: int


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
            is_alone = len(group.numbers) == 1  # what was received may be its result
            pieces = [ranks.contiguous()] if is_alone else _split_copy(ranks, group.sizes, dim=1)
            for number, piece in zip(group.numbers, pieces, strict=True):
                unpacked[number] = piece.view(self.row_shapes[number])
        return unpacked


def _typed(payload: Tensor, group: _Group) -> Tensor:
    return payload.narrow(-1, group.start, group.stop - group.start).view(group.dtype)
