"""Plans of all ranks, made in one thread: for properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from accel_core.storage import plan as planning
from accel_core.storage.leaves import Box, Declared, Key
from accel_core.storage.plan import Group, gather_groups


class Untold(BaseException):
    """The others have not told yet what this rank waits for."""


class Turn:
    """A rank that agrees with others: it goes on with what is known, and ends at what is not."""

    nodes: Sequence[int]

    def __init__(self, rank: int, size: int, rounds: list[list[Any]], told: list[Any]) -> None:
        self.rank, self.nodes = rank, [0] * size
        self._rounds, self._told = iter(rounds), told

    def together(self, step: str, action: Callable[[], Any]) -> list[Any]:
        del step
        value = action()
        known = next(self._rounds, None)
        if known is None:
            self._told.append(value)
            raise Untold
        return known


def in_turns(size: int, action: Callable[[Turn], Any]) -> tuple[list[Any], list[list[Any]]]:
    """Call a collective action on each rank, one after the other, until all have told all.

    Returns each rank's result, and what each told in each round.
    """
    rounds: list[list[Any]] = []
    while True:
        results: list[Any] = []
        told: list[Any] = []
        for rank in range(size):
            with suppress(Untold):
                results.append(action(Turn(rank, size, rounds, told)))
        if not told:
            return results, rounds
        assert len(told) == size, "some ranks are in a collective and others are not"
        rounds.append(told)


def groups_of(declarations: Sequence[Mapping[Key, Declared]]) -> list[list[Group]]:
    """For each rank, the groups that it knows."""
    found, _ = in_turns(
        len(declarations),
        lambda comm: gather_groups(comm, declarations[comm.rank], lambda: None),
    )
    return [groups for _, groups in found]


def plan(declarations: Sequence[Mapping[Key, Declared]]) -> list[dict[Key, list[Box]]]:
    """For each rank, the boxes it writes."""
    disks = [0] * len(declarations)
    return [planning.plan(groups, rank, disks) for rank, groups in enumerate(groups_of(declarations))]
