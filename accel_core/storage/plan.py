"""Plan which rank writes which box. The boxes must cover the whole state.

A state has many leaves but few different declarations. Each rank sends its different declarations, and a
digest of the mapping from leaves to declarations. Ranks exchange the names of leaves only if the digests
differ, and then one rank sends the names for each digest.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from attrs import field, frozen
from xxhash import xxh3_128_hexdigest

from accel_core.errors import CheckpointError
from accel_core.storage.leaves import Box, Declared, Key
from accel_core.storage.tensor_bytes import name_of

if TYPE_CHECKING:
    from accel_core.storage.protocols import Comm

Names = Sequence[tuple[Key, int]]
"""(key, number of its declaration) of each leaf that a rank has."""


class _RankDeclarations(NamedTuple):
    """The declarations that a rank sends to the other ranks."""

    nonce: str
    """A new random text; the plan uses rank 0's."""
    digest: str
    """Digest of the rank's `Names`."""
    declarations: tuple[Declared, ...]
    """The different declarations, in the order of their numbers."""


@frozen
class Group:
    """Leaves that are held by the same ranks, and that each of these ranks declares alike."""

    keys: Sequence[Key]
    held: Sequence[tuple[int, Declared]]
    """(rank, its declaration), in rank order."""
    holders: Mapping[Box, Sequence[int]] = field(init=False)
    """Box -> the ranks that hold it. Empty boxes of non-empty leaves are left out."""

    @holders.default
    def _holders(self) -> Mapping[Box, Sequence[int]]:
        holders: dict[Box, list[int]] = defaultdict(list)
        for rank, leaf in self.held:
            for box in leaf.boxes:
                if 0 not in box.shape or 0 in leaf.shape:
                    holders[box].append(rank)
        return holders


def gather_groups(
    comm: Comm, declared: Mapping[Key, Declared], check: Callable[[], object]
) -> tuple[str, list[Group]]:
    """Return a new nonce for the plan and the groups of all ranks, the same on each rank. Collective.

    Raises:
        CheckpointError: `check` failed on some rank.
    """
    names: list[tuple[Key, int]] = []

    def tell() -> _RankDeclarations:
        check()
        numbers: dict[Declared, int] = {}
        names.extend((key, numbers.setdefault(leaf, len(numbers))) for key, leaf in declared.items())
        digest = xxh3_128_hexdigest(repr(names).encode())
        return _RankDeclarations(secrets.token_hex(8), digest, tuple(numbers))

    told = comm.together("save_state: plan", tell)
    digests = [each.digest for each in told]
    known: dict[str, Names] = {digests[comm.rank]: names}
    if len(set(digests)) > 1:
        mine = names if digests.index(digests[comm.rank]) == comm.rank else None
        heard = comm.together("save_state: names of leaves", lambda: mine)
        known = {digest: each for digest, each in zip(digests, heard, strict=True) if each is not None}
    return told[0].nonce, _group(told, known)


def _group(told: Sequence[_RankDeclarations], known: Mapping[str, Names]) -> list[Group]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, each in enumerate(told):
        ranks[each.digest].append(rank)
    places: dict[Key, list[tuple[str, int]]] = defaultdict(list)
    for digest in ranks:
        for key, number in known[digest]:
            places[key].append((digest, number))
    alike: dict[tuple[tuple[str, int], ...], list[Key]] = defaultdict(list)
    for key, place in places.items():
        alike[tuple(place)].append(key)
    groups = []
    for numbers, keys in alike.items():
        held = [(rank, told[rank].declarations[n]) for digest, n in numbers for rank in ranks[digest]]
        groups.append(Group(keys, sorted(held, key=itemgetter(0))))
    return groups


def plan(groups: Sequence[Group], rank: int, disks: Sequence[int]) -> dict[Key, list[Box]]:
    """Return key -> boxes of the leaves that this rank writes.

    Every rank computes the plan from the same groups, so that each box has one writer on each disk whose
    ranks hold it. Equal replicas are spread, the largest first, over the ranks with the least to write.

    Args:
        groups: the groups of all ranks, from `gather_groups`.
        rank: the rank that writes the returned boxes.
        disks: rank -> number of its disk.

    Raises:
        CheckpointError: ranks disagree about a leaf, or its boxes leave a gap, overlap, or are held
            twice without being declared replicated. The message lists the first ten problems.
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
                if len(near) > 1 and group.held[0][1].any_replica_may_write:
                    shared += [(-box.volume, key, box, near) for key in group.keys]
                    continue
                # A fixed writer: its load counts before equal replicas are spread below.
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
    """Return the given ranks, grouped by disk."""
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
    # Sweep along the dimension with the most cuts: a box can only overlap boxes that have not ended there.
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
    """Return the intersection of two boxes; None if it has no elements."""
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
    """Raise an error of this kind that lists the first ten problems; do nothing without problems."""
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
