"""Plan which rank writes which box. The boxes must make up the whole state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_core.contract.state import Leaf
from accel_core.distributed.tensor_bytes import name_of
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["Box", "Declared", "Key", "declare", "intersect", "plan", "raise_problems", "tiling_problem"]

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
    boxes = tuple(Box(offset, size) for offset, size, _ in parts)
    return Declared(kind, shape, layout, replicated, spread, dtypes, boxes)


def plan(
    declarations: Sequence[Mapping[Key, Declared]], domains: Sequence[int] = ()
) -> list[dict[Key, list[Box]]]:
    """For each rank, the boxes it writes.

    Every rank computes the same from all declarations.

    Replicas that are equal are spread, the largest first, over the ranks with the least to write.
    `domains`: rank -> its disk, where there are several; each gets all that its ranks hold.

    Raises:
        CheckpointError: ranks disagree about a leaf, its boxes leave a gap, overlap, or are held
            twice without being declared replicated. All problems are named.
    """
    by_key: dict[Key, list[tuple[int, Declared]]] = defaultdict(list)
    for rank, declared in enumerate(declarations):
        for key, leaf in declared.items():
            by_key[key].append((rank, leaf))
    problems: list[str] = []
    items: list[tuple[int, Key, Box, list[int]]] = []
    for key, held in by_key.items():
        holders: dict[Box, list[int]] = defaultdict(list)
        for rank, leaf in held:
            for box in leaf.boxes:
                if box.volume or not math.prod(leaf.shape):
                    holders[box].append(rank)
        if problem := _problem(held, holders):
            problems.append(f"{key[0]}: {key[1]}: {problem}")
        spread = held[0][1].spread
        for box, ranks in holders.items():
            disks: dict[int, list[int]] = defaultdict(list)
            for rank in ranks:
                disks[domains[rank] if domains else 0].append(rank)
            items += [(box.volume, key, box, each if spread else each[:1]) for each in disks.values()]
    remedy = "this must be fixed in the plugin that describes it"
    raise_problems(problems, "the state of this run cannot be saved", remedy)
    writes: list[dict[Key, list[Box]]] = [{} for _ in declarations]
    load = [0] * len(declarations)
    for volume, key, box, ranks in sorted(items, key=lambda item: (len(item[3]) > 1, -item[0])):
        rank = min(ranks, key=load.__getitem__)
        writes[rank].setdefault(key, []).append(box)
        load[rank] += volume
    return writes


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


def raise_problems(problems: Sequence[str], what: str, remedy: str, *, path: str | None = None) -> None:
    """Raise a CheckpointError that names the problems, if there is any."""
    if problems:
        more = [f"... and {len(problems) - 10} more"] if len(problems) > 10 else []
        lines = [f"{what}:", *(f"  {each}" for each in [*problems[:10], *more]), remedy]
        raise CheckpointError("\n".join(lines), path=path)


def _problem(held: Sequence[tuple[int, Declared]], holders: Mapping[Box, Sequence[int]]) -> str | None:
    first_rank, first = held[0]
    for rank, leaf in held:
        if leaf[:5] != first[:5]:
            return f"rank {first_rank} says {first[:5]}, rank {rank} {leaf[:5]}"
    dtypes = {name_of(dtype) for _, leaf in held for dtype in leaf.dtypes}
    if len(dtypes) > 1:
        return f"its parts have several dtypes, {', '.join(sorted(dtypes))}"
    for box, ranks in holders.items():
        if len(ranks) > 1 and not first.replicated and box.volume:
            return f"ranks {ranks[0]} and {ranks[1]} both hold {box}, which is not declared replicated"
    return tiling_problem(first.shape, holders)
