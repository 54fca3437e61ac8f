"""Plan which rank writes which box. The boxes must make up the whole state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from attrs import field, frozen

from accel_core.errors import CheckpointError
from accel_core.storage.leaves import Leaf
from accel_core.storage.tensor_bytes import name_of

if TYPE_CHECKING:
    import torch

Key = tuple[str, str]
"""Key of a leaf: (unit, `model/NAME` | `optimizer/NAME/KEY` | ...).

The run's own leaves have the unit "".
"""


class Box(NamedTuple):
    """A rectangular part of a leaf."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.offset, self.shape, strict=False)))

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return (
            "["
            + ", ".join(f"{start}:{end}" for start, end in zip(self.offset, self.ends, strict=False))
            + "]"
        )


class Declared(NamedTuple):
    """A rank's description of a leaf for the others: everything but the data."""

    kind: str
    shape: tuple[int, ...]
    layout: str | None
    replicated: bool
    spread: bool
    """True if replicas are equal, so that any rank may write the leaf.

    Otherwise the lowest rank that holds a replica writes it.
    """
    dtypes: tuple[torch.dtype, ...]
    boxes: tuple[Box, ...]


@frozen
class Group:
    """Leaves of which each rank that has one has all, declared alike.

    held: (rank, its declaration), by rank.
    """

    keys: Sequence[Key]
    held: Sequence[tuple[int, Declared]]
    holders: Mapping[Box, Sequence[int]] = field(init=False)
    """Box -> the ranks that hold it.

    Empty boxes of leaves with elements are not among them.
    """

    @holders.default
    def _holders(self) -> Mapping[Box, Sequence[int]]:
        holders: dict[Box, list[int]] = defaultdict(list)
        for rank, leaf in self.held:
            for box in leaf.boxes:
                if 0 not in box.shape or 0 in leaf.shape:
                    holders[box].append(rank)
        return holders


def declare(leaf: Leaf, *, spread: bool) -> Declared:
    """Return the declaration of a leaf: one object for equal ones.

    Leaves are many, their shapes are few.
    """
    # A list first: this runs for every leaf of every save, and a generator takes twice the time.
    parts = tuple([(tuple(offset), tensor.shape, tensor.dtype) for offset, tensor in leaf.shards])
    return _declared(leaf.kind, tuple(leaf.global_shape), leaf.layout, leaf.replicated, spread, parts)


@lru_cache(maxsize=4096)
def _declared(
    kind: str, shape: tuple[int, ...], layout: str | None, replicated: bool, spread: bool, parts: Any
) -> Declared:
    """Return the declaration whose parts are (offset, shape, dtype)."""
    dtypes = tuple(dtype for _, _, dtype in parts)
    boxes = tuple(Box(offset, tuple(size)) for offset, size, _ in parts)
    return Declared(kind, shape, layout, replicated, spread, dtypes, boxes)


def plan(groups: Sequence[Group], rank: int, disks: Sequence[int]) -> dict[Key, list[Box]]:
    """Return the boxes that this rank writes, the largest first.

    Every rank computes it from the same groups, so that each box has one writer on each disk whose ranks
    hold it. Replicas that are equal are spread, the largest first, over the ranks with the least to write.
    `disks`: rank -> its disk.

    Raises:
        CheckpointError: ranks disagree about a leaf, its boxes leave a gap, overlap, or are held
            twice without being declared replicated. All problems are named.
    """
    problems: list[str] = []
    mine: list[tuple[int, Key, Box]] = []
    shared: list[tuple[int, Key, Box, Sequence[int]]] = []
    load = [0] * len(disks)
    for group in groups:
        if problem := _problem(group.held, group.holders):
            problems += [f"{key[0]}: {key[1]}: {problem}" for key in group.keys]
        for box, ranks in group.holders.items():
            for near in _by_disk(ranks, disks):
                if len(near) > 1 and group.held[0][1].spread:
                    shared += [(-box.volume, key, box, near) for key in group.keys]
                    continue
                load[near[0]] += box.volume * len(group.keys)
                if near[0] == rank:
                    mine += [(-box.volume, key, box) for key in group.keys]
    remedy = "save on all ranks, without `alone`" if len(disks) == 1 else "the plugin must describe all of it"
    raise_problems(problems, "what the ranks hold is not the whole state", remedy)
    mine.sort(key=itemgetter(0))
    for volume, key, box, near in sorted(shared, key=itemgetter(0, 1)):
        writer = min(near, key=load.__getitem__)
        load[writer] -= volume
        if writer == rank:
            mine.append((volume, key, box))
    writes: dict[Key, list[Box]] = {}
    for _, key, box in mine:
        writes.setdefault(key, []).append(box)
    return writes


def _by_disk(ranks: Sequence[int], disks: Sequence[int]) -> Collection[Sequence[int]]:
    """Return the ranks of each disk among these."""
    found: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        found[disks[rank]].append(rank)
    return found.values()


def tiling_problem(shape: tuple[int, ...], boxes: Collection[Box]) -> str | None:
    """Return why `boxes` do not cover a tensor of `shape` exactly once, or None."""
    if [*boxes] == [((0,) * len(shape), shape)]:  # the usual case
        return None
    for box in boxes:
        if not len(box.offset) == len(box.shape) == len(shape) or any(
            start < 0 or end > whole for start, end, whole in zip(box.offset, box.ends, shape, strict=True)
        ):
            return f"{box} is not inside of {list(shape)}"
    # Along the dimension that is cut most, a box can only overlap those still open there.
    along = max(range(len(shape)), key=lambda dim: len({box.offset[dim] for box in boxes}), default=0)
    opened: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset[along:]) if len(boxes) > 1 else ():
        opened = [other for other in opened if other.ends[along:][:1] > box.offset[along:][:1]]
        for other in opened:
            if intersect(box, other):
                return f"{other} and {box} overlap"
        opened.append(box)
    lacking = math.prod(shape) - sum(box.volume for box in boxes)
    if lacking or not boxes:
        return f"{lacking} of its {math.prod(shape)} elements are held by no rank"
    return None


def intersect(one: Box, other: Box) -> Box | None:
    """Return the part that both boxes have, if it has any element."""
    offset = tuple(map(max, one.offset, other.offset))
    shape = tuple(end - start for start, end in zip(offset, map(min, one.ends, other.ends), strict=True))
    return Box(offset, shape) if min(shape, default=1) > 0 else None


def raise_problems(
    problems: Sequence[str],
    what: str,
    remedy: str,
    *,
    path: str | None = None,
    kind: type[CheckpointError] = CheckpointError,
) -> None:
    """Raise a CheckpointError of this kind that names the problems, if there is any."""
    if problems:
        more = [f"... and {len(problems) - 10} more"] if len(problems) > 10 else []
        lines = [f"{what}:", *(f"  {each}" for each in [*problems[:10], *more]), remedy]
        raise kind("\n".join(lines), path=path)


def _problem(held: Sequence[tuple[int, Declared]], holders: Mapping[Box, Sequence[int]]) -> str | None:
    first_rank, first = held[0]
    for rank, leaf in held:
        if leaf[:5] != first[:5]:
            return f"rank {first_rank} says {first[:5]}, rank {rank} {leaf[:5]}"
    dtypes = {dtype for _, leaf in held for dtype in leaf.dtypes}
    if len(dtypes) > 1:
        return f"its parts have several dtypes, {', '.join(sorted(map(name_of, dtypes)))}"
    for box, ranks in holders.items():
        if len(ranks) > 1 and not first.replicated and box.volume:
            return f"ranks {ranks[0]} and {ranks[1]} both hold {box}, which is not declared replicated"
    return tiling_problem(first.shape, holders)
