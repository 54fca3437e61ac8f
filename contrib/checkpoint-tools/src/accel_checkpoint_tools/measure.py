"""The distance of two tensors, in one pass over their blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, frozen

from accel_inspect.blocks import blocks
from accel_inspect.tensors import StoredTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Difference", "Tolerance", "measure"]


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
    where the elements are not numbers to numpy; NaN, where only one of them has a NaN.
    """

    elements: int
    different: int
    max_abs: float | None = None
    relative: float | None = None
    cosine: float | None = None


def measure(a: StoredTensor, b: StoredTensor, tolerance: Tolerance) -> Difference | None:
    """Return how two tensors of one shape differ; None if all elements are equal.

    Reads a second time only what is not the same to the byte. Holds a few blocks at a time.
    """
    if a.dtype == b.dtype and _is_same(a, b):
        return None
    sums = _Sums(tolerance)
    for block in blocks(a.shape):
        if a.is_measurable and b.is_measurable:
            sums.add(a.read(block), b.read(block))
        else:
            sums.count(a.read(block), b.read(block))
    return sums.result(measured=a.is_measurable and b.is_measurable) if sums.different else None


def _is_same(a: StoredTensor, b: StoredTensor) -> bool:
    return all(
        np.array_equal(a.read(block).reshape(-1).view(np.uint8), b.read(block).reshape(-1).view(np.uint8))
        for block in blocks(a.shape)
    )


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

    def count(self, a: NDArray[Any], b: NDArray[Any]) -> None:
        self.elements += a.size
        self.different += a.size if a.dtype != b.dtype else int(np.count_nonzero(a != b))

    def add(self, a: NDArray[Any], b: NDArray[Any]) -> None:
        wide = np.complex128 if "c" in a.dtype.kind + b.dtype.kind else np.float64
        one, other = a.astype(wide).reshape(-1), b.astype(wide).reshape(-1)
        with np.errstate(all="ignore"):
            same = (a == b).reshape(-1) if a.dtype == b.dtype else one == other
            same |= np.isnan(one) & np.isnan(other)
            distance = np.abs(one - other)
            if a.dtype.kind in "iu" and b.dtype.kind in "iu":
                distance = np.maximum(distance, 1.0)  # large ones that differ may be one number as float64
            distance[same] = 0.0
            near = distance <= self.tolerance.atol + self.tolerance.rtol * np.abs(other)
            near &= np.isfinite(distance)
            self.elements += one.size
            self.different += int(np.count_nonzero(~(near | same)))
            self.largest = float(np.maximum(self.largest, distance.max(initial=0.0)))
            finite = np.isfinite(one) & np.isfinite(other)
            one[~finite] = other[~finite] = distance[~finite] = 0
            self.squares_a += float(np.vdot(one, one).real)
            self.squares_b += float(np.vdot(other, other).real)
            self.products += float(np.vdot(one, other).real)
            self.squares += float(distance @ distance)

    def result(self, *, measured: bool) -> Difference:
        if not measured:
            return Difference(self.elements, self.different)
        relative = math.sqrt(self.squares / self.squares_a) if self.squares_a else math.inf
        relative = relative if math.isfinite(self.largest) else self.largest
        norms = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        ratio = self.products / norms if norms else 0.0
        # Beyond 1e154 squares are no numbers any more, and nor is the angle.
        cosine = min(1.0, max(-1.0, ratio)) if math.isfinite(ratio) and math.isfinite(norms) else math.nan
        return Difference(self.elements, self.different, self.largest, relative, cosine)
