"""Read the tensors of a checkpoint, by key."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from accel_core.storage.codec import decode
from accel_core.storage.files import BLOCK_BYTES, DataFile, damaged, malformed_as_damaged
from accel_core.storage.leaves import Box, Key, Kind, Leaf
from accel_core.storage.opened import Block, Opened
from accel_core.storage.plan import intersect, tiling_problem
from accel_core.storage.tensor_bytes import DTYPES, bytes_within, copyable

if TYPE_CHECKING:
    from pathlib import Path

    from accel_core.errors import CheckpointError

STAGING_BYTES: Final = 16 << 20
"""Bytes read at a time if a tensor cannot be read directly into its memory."""
ALIKE: Final = 64
"""Number of neighbouring small tensors of one size from which a separate read pays."""
SMALL_ELEMENTS: Final = 1 << 14
"""Elements up to which tensors are read together; for larger tensors the cost per read is negligible."""

_Small: TypeAlias = tuple[int, int, Tensor]
"""(start in the file, number of elements, tensor to fill)."""


@define
class Stored:
    """A tensor of the checkpoint, with the file and start of each of its boxes.

    Treat as immutable. Not frozen: frozen attrs classes take twice as long to make, and every tensor has one.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    layout: str | None
    boxes: dict[Box, tuple[DataFile, int]] = field(factory=dict, eq=False)
    _lacks: Callable[[str], CheckpointError] | None = field(default=None, eq=False)
    """Returns the error for boxes on another node; None if all boxes are on this node."""

    def tensor(self) -> Tensor:
        """Return the whole tensor, newly allocated on the CPU."""
        tensor = torch.empty(self.shape, dtype=DTYPES[self.dtype], device="cpu")
        self.read(tensor)
        return tensor

    def read(self, target: Tensor, offset: tuple[int, ...] | None = None) -> None:
        """Fill `target` from the stored tensor, or from its part that starts at `offset`."""
        shards = ((offset or (0,) * len(self.shape), target.detach()),)
        fill([(self, Leaf(kind=self.kind, global_shape=self.shape, shards=shards))])

    @property
    def place(self) -> tuple[Path, int] | None:
        """(local file, start in bytes) of the tensor; None if cut, in a plugin's layout, or not local."""
        if len(self.boxes) != 1 or self.layout is not None:
            return None
        ((_, (file, start)),) = self.boxes.items()
        path = file.home.local(file.name)
        return None if path is None else (path, start)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def number(self) -> float:
        """Return the value of a tensor with one element."""
        return float(self.tensor())

    def parts(self, leaf: Leaf | None) -> Iterator[tuple[DataFile, int, int]]:
        """Yield (file, start, end) of the bytes that `fill` reads for a leaf; for None, of all boxes."""
        for wanted in self.boxes if leaf is None else _boxes_of(leaf):
            boxes = [wanted] if wanted in self.boxes else self.boxes
            for box in boxes:
                file, start = self.boxes[box]
                if box == wanted:
                    yield file, start, start + box.volume * DTYPES[self.dtype].itemsize
                elif common := intersect(box, wanted):
                    row = math.prod(box.shape[1:]) * DTYPES[self.dtype].itemsize
                    first = start + (common.offset[0] - box.offset[0]) * row
                    yield file, first, first + common.shape[0] * row

    def _join(self, tensor: Tensor, wanted: Box) -> None:
        """Fill `tensor`, the part `wanted` of the whole tensor, from the stored boxes that overlap it."""
        for box, (file, start) in self.boxes.items():
            if common := intersect(box, wanted):
                self._copy(tensor[_slices(common, wanted)], common, box, file, start)

    def _copy(self, target: Tensor, part: Box, box: Box, file: DataFile, start: int) -> None:
        """Fill `target` with the part `part` of a box, up to `STAGING_BYTES` of the file at a time."""
        if not part.shape:
            target.copy_(file.tensor(self.dtype, (), start))
            return
        row = math.prod(box.shape[1:])
        size = row * DTYPES[self.dtype].itemsize
        first = part.offset[0] - box.offset[0]
        if size > STAGING_BYTES:
            inner_part, inner_box = (Box(each.offset[1:], each.shape[1:]) for each in (part, box))
            for number in range(part.shape[0]):
                self._copy(target[number], inner_part, inner_box, file, start + (first + number) * size)
            return
        at = max(1, STAGING_BYTES // max(1, size))
        inner = slice(None), *_slices(part, box)[1:]
        for begin in range(0, part.shape[0], at):
            rows = min(at, part.shape[0] - begin)
            source = file.tensor(self.dtype, (rows, *box.shape[1:]), start + (first + begin) * size)
            filled, found = copyable((target[begin : begin + rows], source[inner]))
            filled.copy_(found)

    def require(self, leaf: Leaf) -> None:
        """Raise CheckpointError if a part that this rank needs is on another node."""
        if self._lacks is not None:
            wanted = _boxes_of(leaf)
            common = [intersect(box, each) for each in wanted for box in self.boxes]
            if sum(each.volume for each in wanted) > sum(each.volume for each in common if each):
                raise self._lacks(f"parts of a tensor of shape {list(self.shape)}")


def _boxes_of(leaf: Leaf) -> list[Box]:
    return [Box(tuple(offset), tuple(tensor.shape)) for offset, tensor in leaf.shards]


@frozen(eq=False)
class Checkpoint(Opened):
    """An opened checkpoint with its tensors."""

    ranks: Mapping[int, Mapping[str, Any]]
    """Rank -> its state, still encoded."""
    tensors: Mapping[Key, Stored]

    @classmethod
    def with_tensors(cls, files: Opened) -> Checkpoint:
        """Return the opened checkpoint with a description of its tensors; no tensor is read yet.

        Raises:
            CheckpointError: the index of a rank is not as a save writes it.
        """
        tensors: dict[Key, Stored] = {}
        cut: set[Key] = set()
        ranks: dict[int, Any] = {}
        for rank, (data, index) in files.shares.items():
            with malformed_as_damaged(f"{data.home}/rank-{rank:05d}.json"):
                cut |= _add_tensors(tensors, rank, files)
                ranks[rank] = index["state"]
        with malformed_as_damaged(files.place):
            for unit, key in cut if not files.absent else ():
                stored = tensors[unit, key]
                if problem := tiling_problem(stored.shape, stored.boxes):
                    raise ValueError(f"{unit}: {key}: {problem}")
        # Drop the indexes to free memory: `tensors` has their content.
        shares: dict[int, tuple[DataFile, dict[str, Any]]] = {
            rank: (data, {}) for rank, (data, _) in files.shares.items()
        }
        return cls(files.place, files.manifest, files.state, shares, files.meter, ranks, tensors)

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """Return the state of one rank, still encoded."""
        if rank not in self.ranks:
            raise self.lacks(f"what belongs to rank {rank} alone")
        return self.ranks[rank]

    def blocks_of(self, places: Iterable[tuple[Stored, Leaf | None]]) -> set[Block]:
        """Return the blocks that are read for these leaves; None stands for the whole tensor."""
        ranks = {data: rank for rank, (data, _) in self.shares.items()}
        found: set[Block] = set()
        for stored, leaf in places:
            for file, start, end in stored.parts(leaf):
                blocks = range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
                found.update((ranks[file], number) for number in blocks)
        return found

    def decode(self, value: Any, path: str) -> Any:
        """Return the decoded value, with its large tensors read from the data files."""
        try:
            return decode(value, path, self._fetch)
        except RecursionError as error:
            raise damaged(self.place, f"{path} is nested without end") from error

    def _fetch(self, key: str) -> Tensor:
        return self.tensors["", key].tensor()


def _add_tensors(tensors: dict[Key, Stored], rank: int, files: Opened) -> set[Key]:
    """Add the tensors of a rank's file; return the keys of tensors with several boxes."""
    data, _ = files.shares[rank]
    lacks, has_domains, end = files.lacks if files.absent else None, files.manifest.domains, data.record.size
    cut = set()
    for unit, key, ((kind, shape, dtype, layout), whole_box), where in files.described(rank, _outline):
        described = Stored(kind, shape, dtype, layout, lacks=lacks)
        stored = tensors.setdefault((unit, key), described)
        if stored is not described and stored != described:
            raise ValueError(f"{key} is described otherwise by another rank")
        is_cut = type(where) is list
        parts = _measured_parts(dtype, where) if is_cut else [(whole_box, where)]
        for (box, size), start in parts:
            if type(start) is not int or not 0 <= start <= end - size:
                raise ValueError(f"{key} {box} is not within its file, at {start!r}")
            # Each node has its own copy of a replicated box; the copy of the lowest rank is read.
            if box in stored.boxes and (not has_domains or stored.boxes[box][0] is data):
                raise ValueError(f"{key} {box} is there twice")
            stored.boxes.setdefault(box, (data, start))
        if is_cut or len(stored.boxes) > 1:
            cut.add((unit, key))
    return cut


def _outline(
    each: Mapping[str, Any],
) -> tuple[tuple[Kind, tuple[int, ...], str, str | None], tuple[Box, int]]:
    """Return ((kind, shape, dtype, layout), (box, bytes)) of an outline; the box is the whole tensor."""
    shape, dtype = tuple(each["shape"]), each["dtype"]
    return (each["kind"], shape, dtype, each["layout"]), _measured(dtype, (0,) * len(shape), shape)


def _measured_parts(dtype: str, boxes: Iterable[Any]) -> list[tuple[tuple[Box, int], int]]:
    return [(_measured(dtype, tuple(offset), tuple(shape)), start) for offset, shape, start in boxes]


@lru_cache(maxsize=4096)
def _measured(dtype: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Box, int]:
    """Return a box and its size in bytes; equal boxes share one object."""
    if not {*map(type, offset), *map(type, shape)} <= {int}:
        raise ValueError(f"[{offset}, {shape}] is not a box of whole numbers")
    return Box(offset, shape), bytes_within(sys.maxsize, dtype, shape, 0)


def fill(pairs: Iterable[tuple[Stored, Leaf]]) -> None:
    """Overwrite the shards of the leaves with the stored tensors.

    Small tensors that are neighbours in a file are read together.

    Raises:
        CheckpointError: a part is on another node, or cannot be read.
    """
    # By device too: some devices' libraries crash if one foreach copy has targets on several devices.
    small: dict[tuple[DataFile, str, torch.device], list[_Small]] = defaultdict(list)
    for stored, leaf in pairs:
        if stored._lacks is not None:
            stored.require(leaf)
        for offset, tensor in leaf.shards:
            # A tuple equals a Box with the same items, and is faster to make.
            wanted: Any = tuple(offset), tensor.shape
            file, start = stored.boxes.get(wanted, (None, 0))
            if file is None:
                stored._join(tensor, Box(*wanted))
            elif 0 < (size := tensor.numel()) <= SMALL_ELEMENTS and not _is_lazy(tensor):
                small[file, stored.dtype, tensor.device].append((start, size, tensor))
            elif _takes_bytes(tensor, stored.dtype):
                file.read(start, tensor.reshape(-1).view(torch.uint8).numpy().data)
            else:
                box = Box(*wanted)
                stored._copy(tensor, box, box, file, start)
    for (file, dtype, _), parts in small.items():
        for start, sizes, targets in _neighbours(parts, DTYPES[dtype].itemsize):
            torch._foreach_copy_(targets, _cut(file.tensor(dtype, (sum(sizes),), start), targets))


def _cut(source: Tensor, targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the flat tensor, cut into parts with the shapes of the targets."""
    if len({target.shape for target in targets}) > 1:
        return tuple(_unflatten_dense_tensors(source, targets))
    return source.view(len(targets), *targets[0].shape).unbind()  # fast path: a third of the time


def _neighbours(parts: Iterable[_Small], itemsize: int) -> Iterator[tuple[int, list[int], list[Tensor]]]:
    """Yield (start in the file, sizes, tensors) of each run of tensors without a gap in the file.

    A run of `ALIKE` or more tensors ends before a tensor of another size, to use the fast path of `_cut`.
    """
    sizes: list[int] = []
    run: list[Tensor] = []
    first = end = 0
    for start, size, tensor in sorted(parts, key=itemgetter(0)):
        is_other = len(run) >= ALIKE and size != sizes[-1]
        if run and (start != end or end - first >= STAGING_BYTES or is_other):
            yield first, sizes, run
            sizes, run = [], []
        first = start if not run else first
        sizes.append(size)
        run.append(tensor)
        end = start + size * itemsize
    if run:
        yield first, sizes, run


def _takes_bytes(tensor: Tensor, dtype: str) -> bool:
    """Return True if bytes of the file can be read directly into the tensor's memory."""
    return tensor.is_cpu and tensor.dtype == DTYPES[dtype] and tensor.is_contiguous() and not _is_lazy(tensor)


def _is_lazy(tensor: Tensor) -> bool:
    """Return True for a lazy conjugate or negative view, whose memory differs from its values."""
    return tensor.is_neg() or tensor.is_conj()


def _slices(part: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(
        slice(first - start, first - start + size)
        for first, start, size in zip(part.offset, whole.offset, part.shape, strict=True)
    )
