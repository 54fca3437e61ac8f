"""The tensors of a checkpoint, read block by block, without torch."""

from __future__ import annotations

import math
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import ml_dtypes
import numpy as np
from attrs import field, frozen

from accel_core import CheckpointError, CheckpointFiles
from accel_inspect.blocks import Part, common

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Box", "Key", "StoredTensor", "in_order", "inline", "tensors_of"]

Key = tuple[str, str]
"""A unit ("" is the run itself), and `model/NAME`, `optimizer/NAME/KEY` or alike."""

_NUMPY: Final = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
)
_ML_DTYPES: Final = "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
NUMBERS: Final[Mapping[str, np.dtype[Any]]] = {
    **{name: np.dtype(name) for name in _NUMPY.split()},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES.split()},
}
"""torch's name of a dtype -> numpy's dtype."""
_BITS: Final[Mapping[str, int]] = {
    "complex32": 4,
    "float4_e2m1fn_x2": 1,
    **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)},
}
"""Dtypes whose elements are not measured -> bytes of an element."""


class File(Protocol):
    """A file on a disk or in a store."""

    @property
    def name(self) -> str:
        """Its name in the folder."""


class Source(Protocol):
    """Bytes that can be read from any place on."""

    @property
    def path(self) -> File:
        """The file."""

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""


@frozen
class Box:
    """A rectangular part of a tensor, and its place in a file."""

    part: Part
    source: Source
    start: int

    def read(self, part: Part, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a part of a block (see `blocks`) that lies within this box."""
        (offset, shape), (first, whole) = part, self.part
        strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
        place = sum((at - begin) * step for at, begin, step in zip(offset, first, strides, strict=True))
        memory = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        self.source.read(self.start + place * dtype.itemsize, memory.data)
        return memory.view(dtype).reshape(shape)


@frozen(eq=False)
class StoredTensor:
    """A tensor of a checkpoint: its description and its boxes, in whatever layout.

    dtype: torch's name. kind: `like_param`, `scalar`, `factored` or `opaque`.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str
    boxes: list[Box] = field(factory=list, repr=False)

    @property
    def is_measurable(self) -> bool:
        """True if its elements are numbers that numpy knows."""
        return self.dtype in NUMBERS

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """numpy's dtype of its elements; an integer's, where numpy has no such numbers.

        Raises:
            CheckpointError: the dtype is not known here.
        """
        known = NUMBERS.get(self.dtype)
        if known is None and self.dtype not in _BITS:
            raise CheckpointError(
                f"a tensor of dtype {self.dtype} is not understood\n"
                "install an accel-inspect that is as new as the accel-core that wrote the checkpoint"
            )
        return known if known is not None else np.dtype(f"u{_BITS[self.dtype]}")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    def read(self, block: Part) -> NDArray[Any]:
        """Return a block (see `blocks`) of the whole tensor, from all of its boxes.

        Raises:
            CheckpointError: the boxes do not make it up exactly once, or a file cannot be read.
        """
        whole, filled = np.empty(block[1], self.numpy_dtype), 0
        for box, part in self._parts(block):
            found = box.read(part, self.numpy_dtype)
            if part == block:
                whole = found
            else:
                whole[_within(part, block)] = found
            filled += found.size
        if filled != whole.size:
            paths = ", ".join(sorted({str(box.source.path) for box in self.boxes}))
            lack = f"of {whole.size} elements of a tensor of shape {list(self.shape)} there are {filled}"
            raise CheckpointError(
                f"{paths}: {lack}\nthe checkpoint is damaged: run `accel checkpoint verify` on it"
            )
        return whole

    def _parts(self, block: Part) -> Iterator[tuple[Box, Part]]:
        """Yield the boxes that have a part of a block, and that part."""
        first, sizes = np.array(block, int)
        starts, ends = self._bounds
        for number in np.flatnonzero(((starts < first + sizes) & (ends > first)).all(axis=1)):
            box = self.boxes[number]
            if (part := common(block, box.part)) is not None:
                yield box, part

    @cached_property
    def _bounds(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The start and end of each box in each dimension.

        There may be 10^5 boxes, and as many blocks.
        """
        sides = np.array([box.part for box in self.boxes], int).reshape(len(self.boxes), 2, len(self.shape))
        return sides[:, 0], sides.sum(axis=1)


def _within(part: Part, block: Part) -> tuple[slice, ...]:
    starts = [first - begin for first, begin in zip(part[0], block[0], strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, part[1], strict=True))


def tensors_of(opened: CheckpointFiles) -> dict[Key, StoredTensor]:
    """Return the tensors of a checkpoint whose files are here, by key, in order.

    Files of several ranks have none, so that of the names is taken; the run's own come last.

    Raises:
        CheckpointError: an index says what no save writes.
    """
    found: dict[Key, StoredTensor] = {}
    taken: set[tuple[Key, Part]] = set()
    for rank, (data, _) in opened.shares.items():
        try:
            for key, part, start in _boxes_in(opened, rank, found):
                # Nodes with disks of their own have a copy each of what is the same on all.
                if not opened.manifest.domains or (key, part) not in taken:
                    found[key].boxes.append(Box(part, data, start))
                    taken.add((key, part))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{data.path.with_suffix('.json')}: this is not what a save writes: {error!r}\n"
                "restore this file, or install an accel-inspect that is as new as what wrote it"
            ) from error
    return dict(sorted(found.items(), key=lambda item: (not item[0][0], in_order("/".join(item[0])))))


def in_order(name: str) -> list[tuple[bool, int, str]]:
    """Return what to sort names by: their words, of which numbers count as numbers."""
    words = re.split("[./]", name)
    return [(word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in words]


def _boxes_in(
    opened: CheckpointFiles, rank: int, found: dict[Key, StoredTensor]
) -> Iterator[tuple[Key, Part, int]]:
    """Yield (key, part, start) of each box of a rank's index.

    Adds the tensors that are not found yet.
    """
    for unit, name, each, where in opened.described(rank, dict):
        own = StoredTensor(tuple(each["shape"]), each["dtype"], each["kind"])
        stored = found.setdefault((unit, name), own)
        if min(own.shape, default=0) < 0 or (own.shape, own.dtype) != (stored.shape, stored.dtype):
            raise ValueError(f"{name} of shape {list(own.shape)}, {own.dtype}")
        boxes = where if isinstance(where, list) else [[[0] * len(own.shape), own.shape, where]]
        for offset, sizes, start in boxes:
            sides = zip(offset, sizes, own.shape, strict=True)
            if start < 0 or not all(0 <= first <= first + size <= whole for first, size, whole in sides):
                raise ValueError(f"a box of {name} at {offset} of shape {sizes}, from {start} on")
            yield (unit, name), (tuple(offset), tuple(sizes)), start


@frozen
class _Memory:
    content: bytes
    path: Path = Path("state")

    def read(self, start: int, into: memoryview) -> None:
        into[:] = self.content[start : start + len(into)]


def inline(body: Any) -> StoredTensor:
    """Return a tensor that stands in a JSON file: `[dtype, shape, base64]`."""
    dtype, shape, text = body
    part = (0,) * len(shape), tuple(shape)
    return StoredTensor(part[1], dtype, "opaque", [Box(part, _Memory(b64decode(text)), 0)])
