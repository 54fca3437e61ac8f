"""Ranks that declare to hold the same do hold the same: contents are compared, by hash."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from accel_core.checkpoint.agree import agree
from accel_core.checkpoint.codec import bytes_of
from accel_core.checkpoint.plan import Box, Declared, Key, refuse

if TYPE_CHECKING:
    from accel_core.checkpoint.leaf import Leaf
    from accel_core.world import Collectives

__all__ = ["compare_replicas"]


def compare_replicas(
    control: Collectives, leaves: Mapping[Key, Leaf], declarations: Sequence[Mapping[Key, Declared]]
) -> None:
    """Collective. Leaves of which only one rank's is kept, as batch norm's statistics, may differ.

    Raises:
        CheckpointError: the ranks that hold a box have different contents; names leaf and ranks.
    """
    holders = Counter(
        (key, box)
        for declared in declarations
        for key, leaf in declared.items()
        for box in set(leaf.boxes)
        if leaf.spread
    )
    here = declarations[control.rank]
    mine = agree(
        control,
        lambda: {
            (key, box): xxh3_64_intdigest(bytes_of(tensor))
            for key, leaf in leaves.items()
            for box, (_, tensor) in zip(here[key].boxes, leaf.shards, strict=True)
            if holders[key, box] > 1
        },
    )
    found: dict[tuple[Key, Box], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, digests in enumerate(control.all_gather_object(mine)):
        for part, digest in digests.items():
            found[part][digest].append(rank)
    problems = [
        f"{key[0]}: {key[1]} {box}: "
        + " differ from ".join(f"rank(s) {_list(ranks)}" for ranks in held.values())
        for (key, box), held in found.items()
        if len(held) > 1
    ]
    remedy = "ranks must be equal here: start them with one seed, average what drifts apart, then save"
    refuse(problems, "ranks hold different contents of what should be the same on all", remedy)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
