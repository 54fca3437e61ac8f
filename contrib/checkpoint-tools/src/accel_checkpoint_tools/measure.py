"""The distance of two tensors, in one pass over their blocks."""

from __future__ import annotations

import math
from typing import Final

import torch
from attrs import define, frozen
from torch import Tensor

from accel_checkpoint_tools.blocks import blocks
from accel_core import Box, Stored

__all__ = ["Difference", "Tolerance", "measure"]

_CODES: Final = {
    getattr(torch, f"{kind}{bits}", None) for kind in ("int", "uint") for bits in range(1, 8)
} | {getattr(torch, "float4_e2m1fn_x2", None)}
"""Dtypes whose elements torch converts to no numbers."""
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype in which integers are compared."""


@frozen
class Tolerance:
    """Elements with |a - b| <= atol + rtol * |b| count as equal, as in numpy."""

    rtol: float = 0.0
    atol: float = 0.0


@frozen
class Difference:
    """The distance of two tensors of one shape, a and b.

    different: number of elements outside the tolerance; NaN equals NaN. max_abs: largest |a - b|.
    relative: norm of a - b over the norm of a. cosine: of the angle between them. The last three are None
    where torch converts the elements to no numbers; NaN, where only one of them has a NaN.
    """

    elements: int
    different: int
    max_abs: float | None = None
    relative: float | None = None
    cosine: float | None = None


def measure(a: Stored | Tensor, b: Stored | Tensor, tolerance: Tolerance) -> Difference | None:
    """Return how two tensors of one shape differ; None if all elements are equal.

    Reads a second time only what is not the same to the byte. Holds a few blocks at a time.
    """
    is_alike = _dtype(a) == _dtype(b)
    if is_alike and all(_is_same(_read(a, block), _read(b, block)) for block in blocks(tuple(a.shape))):
        return None
    sums, is_measured = _Sums(tolerance), _CODES.isdisjoint((_dtype(a), _dtype(b)))
    for block in blocks(tuple(a.shape)):
        if is_measured:
            sums.add(_read(a, block), _read(b, block))
        else:
            sums.count(_read(a, block), _read(b, block))
    return sums.result(is_measured=is_measured) if sums.different else None


def _dtype(of: Stored | Tensor) -> torch.dtype:
    found: torch.dtype = of.dtype if isinstance(of, Tensor) else getattr(torch, of.dtype)
    return found


def _read(of: Stored | Tensor, block: Box) -> Tensor:
    if isinstance(of, Tensor):
        return of[tuple(map(slice, block.offset, block.ends))]
    block_of = torch.empty(block.shape, dtype=_dtype(of))
    of.read(block_of, block.offset)
    return block_of


def _is_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@define
class _Sums:
    """Sums over the blocks so far; of squares, over elements that are finite in both."""

    tolerance: Tolerance
    elements: int = 0
    different: int = 0
    largest: float = 0.0
    squares_a: float = 0.0
    squares_b: float = 0.0
    products: float = 0.0
    squares: float = 0.0

    def count(self, a: Tensor, b: Tensor) -> None:
        self.elements += a.numel()
        is_other = a.dtype != b.dtype
        bytes_of = [each.reshape(-1).view(torch.uint8) for each in (a, b)]
        self.different += a.numel() if is_other else int((bytes_of[0] != bytes_of[1]).sum())

    def add(self, a: Tensor, b: Tensor) -> None:
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        one, other = a.to(wide).reshape(-1), b.to(wide).reshape(-1)
        are_integers = not any(each.is_floating_point() or each.is_complex() for each in (a, b))
        same = one == other
        if are_integers and a.dtype == b.dtype:  # large ones that differ may be one number as float64
            same = (a.view(_INTEGERS[a.itemsize]) == b.view(_INTEGERS[b.itemsize])).reshape(-1)
        same |= one.isnan() & other.isnan()
        distance = (one - other).abs()
        if are_integers:
            distance.clamp_(min=1.0)
        distance[same] = 0.0
        near = distance <= self.tolerance.atol + self.tolerance.rtol * other.abs()
        near &= distance.isfinite()
        self.elements += one.numel()
        self.different += int((~(near | same)).sum())
        largest = float(distance.max())
        if math.isnan(largest) or largest > self.largest:
            self.largest = largest
        finite = one.isfinite() & other.isfinite()
        for each in (one, other, distance):
            each[~finite] = 0
        one, other = one.view(torch.float64), other.view(torch.float64)  # complex ones as pairs
        self.squares_a += float(one @ one)
        self.squares_b += float(other @ other)
        self.products += float(one @ other)
        self.squares += float(distance @ distance)

    def result(self, *, is_measured: bool) -> Difference:
        if not is_measured:
            return Difference(self.elements, self.different)
        relative = math.sqrt(self.squares / self.squares_a) if self.squares_a else math.inf
        relative = relative if math.isfinite(self.largest) else self.largest
        norms = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        ratio = self.products / norms if norms else 0.0
        # Beyond 1e154 squares are no numbers any more, and nor is the angle.
        cosine = min(1.0, max(-1.0, ratio)) if math.isfinite(ratio) and math.isfinite(norms) else math.nan
        return Difference(self.elements, self.different, self.largest, relative, cosine)
