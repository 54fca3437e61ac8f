"""Exchange of what all ranks declare.

Leaves are many, but few are not declared alike. A rank tells its different declarations, and a digest of
which leaves they belong to. The names of leaves travel only where these digests differ, from one rank for
each digest.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_128_hexdigest

from accel_core.storage.plan import Declared, Group, Key

if TYPE_CHECKING:
    from accel_core.storage.protocols import Comm

Names = Sequence[tuple[Key, int]]
"""(leaf, number of its declaration) of each leaf that a rank has."""


class _Told(NamedTuple):
    """A rank's declarations, for the others."""

    word: str
    """For the plan, if this is rank 0."""
    digest: str
    """Of the `Names`."""
    declarations: tuple[Declared, ...]
    """Each once, in the order of their numbers."""


def gather_groups(
    comm: Comm, declared: Mapping[Key, Declared], check: Callable[[], object]
) -> tuple[str, list[Group]]:
    """Return a new word for the plan, and the groups of all ranks.

    Collective; the same on each rank.

    Raises:
        CheckpointError: `check` failed on some rank.
    """
    names: list[tuple[Key, int]] = []

    def tell() -> _Told:
        check()
        numbers: dict[Declared, int] = {}
        names.extend((key, numbers.setdefault(leaf, len(numbers))) for key, leaf in declared.items())
        return _Told(secrets.token_hex(8), xxh3_128_hexdigest(repr(names).encode()), tuple(numbers))

    told = comm.together("save_state: plan", tell)
    digests = [each.digest for each in told]
    known: dict[str, Names] = {digests[comm.rank]: names}
    if len(set(digests)) > 1:
        mine = names if digests.index(digests[comm.rank]) == comm.rank else None
        heard = comm.together("save_state: names of leaves", lambda: mine)
        known = {digest: each for digest, each in zip(digests, heard, strict=True) if each is not None}
    return told[0].word, _group(told, known)


def _group(told: Sequence[_Told], known: Mapping[str, Names]) -> list[Group]:
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
