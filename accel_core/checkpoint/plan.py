"""Who writes which box of which leaf, and whether the boxes of all ranks make up the whole state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from accel_core.checkpoint.codec import name_of
from accel_core.checkpoint.leaf import Leaf
from accel_core.errors import CheckpointError

__all__ = ["Box", "Declared", "Key", "declare", "intersect", "plan", "tiling_problem"]

Key = tuple[str, str]
"""(unit, `model/NAME` | `optimizer/NAME/KEY` | ...). The run's own leaves have the unit ""."""


class Box(NamedTuple):
    """A rectangular part of a leaf."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)


class Declared(NamedTuple):
    """What a rank tells the others of a leaf: everything but the data."""

    kind: str
    shape: tuple[int, ...]
    dtype: str | None
    """None where the rank holds no part of it."""
    replicated: bool
    layout: str | None
    spread: bool
    """Replicas are equal, so any rank may write; else the lowest rank that holds one does."""
    boxes: tuple[Box, ...]


def declare(leaf: Leaf, spread: bool) -> Declared:
    """The declaration of a leaf."""
    boxes = tuple(Box(tuple(offset), tuple(tensor.shape)) for offset, tensor in leaf.shards)
    dtypes = {name_of(tensor.dtype) for _, tensor in leaf.shards}
    dtype = "+".join(sorted(dtypes)) or None
    return Declared(leaf.kind, tuple(leaf.global_shape), dtype, leaf.replicated, leaf.layout, spread, boxes)


def plan(
    declarations: Sequence[Mapping[Key, Declared]], missing: Iterable[Key] = ()
) -> list[dict[Key, list[Box]]]:
    """For each rank, the boxes it writes. Every rank computes the same from all declarations.

    missing: what should have been declared and was not.

    Replicas that are equal are spread, the largest first, over the ranks with the least to write.

    Raises:
        CheckpointError: ranks disagree about a leaf, its boxes leave a gap, overlap, or are held
            twice without being declared replicated. All problems are named.
    """
    by_key: dict[Key, list[tuple[int, Declared]]] = defaultdict(list)
    for rank, declared in enumerate(declarations):
        for key, leaf in declared.items():
            by_key[key].append((rank, leaf))
    problems = [f"{unit}: {key}: no rank offers it" for unit, key in sorted(missing)]
    shared: list[tuple[int, Key, Box, list[int]]] = []
    writes: list[dict[Key, list[Box]]] = [defaultdict(list) for _ in declarations]
    load = [0] * len(declarations)

    def give(rank: int, key: Key, box: Box) -> None:
        writes[rank][key].append(box)
        load[rank] += box.volume

    for key, held in by_key.items():
        holders = _holders(held)
        problem = _disagreement(held, holders) or tiling_problem(held[0][1].shape, holders)
        if problem:
            problems.append(f"{key[0]}: {key[1]}: {problem}")
            continue
        for box, ranks in holders.items():
            if len(ranks) > 1 and held[0][1].spread:
                shared.append((box.volume, key, box, ranks))
            else:
                give(ranks[0], key, box)
    for _, key, box, ranks in sorted(shared, key=lambda item: -item[0]):
        give(min(ranks, key=lambda rank: load[rank]), key, box)
    refuse(
        problems,
        "the state of this run cannot be saved",
        "this must be fixed in the plugin that describes it",
    )
    return [dict(write) for write in writes]


def tiling_problem(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """What keeps `boxes` from covering a tensor of `shape` exactly once."""
    ordered = sorted(boxes)
    if len(ordered) == 1 and ordered[0] == ((0,) * len(shape), shape):
        return None  # nearly always
    for box in ordered:
        if not len(box.offset) == len(box.shape) == len(shape) or any(
            start < 0 or start + size > whole
            for start, size, whole in zip(box.offset, box.shape, shape, strict=True)
        ):
            return f"{_text(box)} is not inside of {list(shape)}"
    # Along the dimension that is cut most, a box can only overlap those still open there.
    along = max(range(len(shape)), key=lambda dim: len({box.offset[dim] for box in ordered}), default=None)
    if along is not None:
        ordered.sort(key=lambda box: box.offset[along])
    opened: list[Box] = []
    for box in ordered:
        if along is not None:
            first = box.offset[along]
            opened = [other for other in opened if other.offset[along] + other.shape[along] > first]
        for other in opened:
            if intersect(box, other) is not None:
                return f"{_text(other)} and {_text(box)} overlap"
        opened.append(box)
    covered, wanted = sum(box.volume for box in ordered), math.prod(shape)
    return None if covered == wanted else f"{wanted - covered} of its {wanted} elements are held by no rank"


def intersect(one: Box, other: Box) -> Box | None:
    """The part that both boxes have, if it has any element."""
    offset = tuple(map(max, one.offset, other.offset))
    ends = (map(sum, zip(box.offset, box.shape, strict=True)) for box in (one, other))
    shape = tuple(end - start for start, end in zip(offset, map(min, *ends), strict=True))
    return Box(offset, shape) if min(shape, default=1) > 0 else None


def refuse(problems: Sequence[str], what: str, remedy: str, *, path: str | None = None) -> None:
    """Raise a CheckpointError that names the problems, if there is any."""
    if problems:
        more = [f"... and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise CheckpointError(
            "\n".join([f"{what}:", *(f"  {each}" for each in [*problems[:10], *more]), remedy]), path=path
        )


def _holders(held: Sequence[tuple[int, Declared]]) -> dict[Box, list[int]]:
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, leaf in held:
        for box in leaf.boxes:
            if box.volume or not math.prod(leaf.shape):
                holders[box].append(rank)
    return holders


def _disagreement(held: Sequence[tuple[int, Declared]], holders: Mapping[Box, Sequence[int]]) -> str | None:
    first_rank, first = held[0]
    dtype_rank, dtype = next(((rank, leaf.dtype) for rank, leaf in held if leaf.dtype), (first_rank, None))
    for rank, leaf in held[1:]:
        if leaf[:2] != first[:2] or leaf[3:6] != first[3:6]:
            return f"rank {first_rank} says {first[:6]}, rank {rank} {leaf[:6]}"
        if leaf.dtype not in (dtype, None):
            return f"rank {dtype_rank} says {dtype}, rank {rank} {leaf.dtype}"
    if dtype and "+" in dtype:
        return f"its boxes have several dtypes, {dtype}"
    for box, ranks in holders.items():
        if len(ranks) > 1 and not first.replicated:
            return f"ranks {ranks[0]} and {ranks[1]} both hold {_text(box)}, which is not declared replicated"
    return None


def _text(box: Box) -> str:
    ranges = (f"{start}:{start + size}" for start, size in zip(box.offset, box.shape, strict=False))
    return f"[{', '.join(ranges)}]"
