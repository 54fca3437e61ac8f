"""Checkpoints on the disks of several nodes: each has the files of its own ranks.

    rank 0                                  the first rank of each other disk
    hears that all ranks have written
    writes the manifest
    publishes `manifest`            ->      writes the same manifest, answers `manifest-R`
    renames its folder
    publishes `publish`             ->      renames its folder, answers `publish-R`
    publishes the verdict           ->      removes what the new checkpoint replaces

A kill in between leaves a save that is complete on all disks and has its name on some. It is loaded, from
under its other name where it has to be, and the next save does not remove it before it has replaced it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from accel_core.checkpoint.agree import gather_from_all_ranks
from accel_core.checkpoint.commit import find_copies, locate
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.manifest import Manifest
    from accel_core.checkpoint.stored import Place
    from accel_core.checkpoint.votes import Message, Votes
    from accel_core.contract.run import Run
    from accel_core.contract.world import Collectives


@frozen
class Disks:
    """The disk of each rank, and what this rank has to do for its own.

    of_rank: rank -> its disk; all 0 where all see one.
    """

    rank: int
    of_rank: Sequence[int]

    @classmethod
    def of(cls, run: Run, control: Collectives) -> Disks:
        """Return the disks of the ranks that save. Collective."""
        here = run.world.node_rank if run.config.project.save_on_each_node else 0
        return cls(control.rank, gather_from_all_ranks(control, "compare disks", lambda: here))

    @property
    def firsts(self) -> list[int]:
        """The first rank of each disk: it makes, names and removes folders.

        Rank 0 comes first.
        """
        return [self.of_rank.index(disk) for disk in sorted(set(self.of_rank))]

    @property
    def is_first(self) -> bool:
        """True for the rank that makes, names and removes folders on its disk."""
        return self.rank in self.firsts

    @property
    def are_several(self) -> bool:
        """True if there is more than one."""
        return len(set(self.of_rank)) > 1

    def ranks_of(self, first: int) -> list[int]:
        """Return the ranks that write to the disk of this one."""
        return [rank for rank, disk in enumerate(self.of_rank) if disk == self.of_rank[first]]

    @property
    def member(self) -> list[list[int]]:
        """The manifest's member `domains`."""
        return [self.ranks_of(first) for first in self.firsts] if self.are_several else []


def ask_other_disks(votes: Votes, others: Collection[int], phase: str, text: str = "") -> list[str]:
    """Ask these first ranks to do a phase of the commit. Returns failures. By rank 0."""
    if not others:
        return []
    votes.publish(phase, {"text": text})
    deadline = time.monotonic() + votes.timeout
    answers = votes.poll_all({rank: f"{phase}-{rank}" for rank in others}, deadline)
    votes.delete(phase, *(f"{phase}-{rank}" for rank in others))
    return votes.failures(answers.items())


def answer(votes: Votes, rank: int, phase: str, deadline: float, action: Callable[[str], Message]) -> None:
    """Do a phase of the commit once rank 0 asks, and answer it.

    Nothing is done if rank 0 gives up.
    """
    asked = votes.poll(phase, deadline, unless="verdict", rank=0)
    if asked is not None:
        votes.publish(f"{phase}-{rank}", action(asked["text"]))


def locate_on_all_disks(run: Run, target: Place) -> Place:
    """Return the newest save named `target` that all disks have. Collective."""
    if not isinstance(target, Path) or not run.config.project.save_on_each_node:
        return locate(target)
    copies = gather_from_all_ranks(run.collectives("control"), "find copies", lambda: find_copies(target))
    everywhere = set.intersection(*(set(found) for found in copies))
    newest = next((save_id for save_id in reversed(copies[0]) if save_id in everywhere), "")
    return copies[run.world.rank].get(newest, target)


def nodes_without(manifest: Manifest, ranks: Collection[int]) -> str:
    """Words for the nodes that have other files than those of these ranks.

    It is "" if these are all.
    """
    nodes = {
        node: [rank for rank in there if rank not in ranks] for node, there in enumerate(manifest.domains)
    }
    return "; ".join(
        f"node {node}, with the files of rank(s) {', '.join(map(str, absent))}"
        for node, absent in nodes.items()
        if absent
    )


def files_are_elsewhere(folder: Place, what: str, nodes: str) -> CheckpointError:
    """Return the error for a part that is on another node's disk."""
    return CheckpointError(
        f"{folder} lacks {what}: it was saved on the disks of several nodes, and what {nodes},"
        f" wrote is not here\ncopy the files of {folder.name} on that node into this folder",
        path=str(folder),
    )
