"""Load one checkpoint on all ranks: open, compare and verify it before any state is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, TypeVar

from accel_core.storage.commit import manifests, read_manifest
from accel_core.storage.files import damaged, listed
from accel_core.storage.opened import Block, Opened, descriptions, reading
from accel_core.storage.ranks import first_here, sharers
from accel_core.storage.tensors import Checkpoint

if TYPE_CHECKING:
    from accel_core.storage.commit import Manifest
    from accel_core.storage.protocols import Comm, Storage


class LoadPlan(Protocol):
    """The changes that a load makes on this rank. Making a plan changes nothing."""

    def blocks(self) -> set[Block]:
        """Return the blocks that this rank reads."""

    def apply(self) -> None:
        """Make the changes."""


P = TypeVar("P", bound=LoadPlan)


def load_planned(
    comm: Comm, place: Storage, save_id: str | None, nonce: str, plan: Callable[[Checkpoint], P]
) -> tuple[Manifest, P]:
    """Load the checkpoint of a save; return its manifest, and the plan that was applied. Collective.

    Args:
        comm: the ranks that load.
        place: the checkpoint's folder.
        save_id: id of the save to load. None: the manifest is damaged; the error says why.
        nonce: text that is the same on all ranks and unique to this load.
        plan: compares the checkpoint with the state of this rank.

    Raises:
        CheckpointError: a file is damaged, or `plan` has failed; raised on all ranks, before any change.
    """
    return _Loading(comm, place, save_id, nonce).run(plan)


class _Loading:
    def __init__(self, comm: Comm, place: Storage, save_id: str | None, nonce: str) -> None:
        self.comm, self.place, self.save_id, self.nonce = comm, place, save_id, nonce
        self._stack = ExitStack()

    def run(self, plan: Callable[[Checkpoint], P]) -> tuple[Manifest, P]:
        comm, made, opened = self.comm, list[P](), list[Checkpoint]()

        def compare() -> set[Block]:
            files = Opened.of(self.place, self._manifest, self._near, texts)
            opened.append(checkpoint := Checkpoint.with_tensors(files))
            made.append(planned := plan(checkpoint))
            # If all ranks share the files, they verify all blocks; else each node verifies its own needs.
            return set() if self._near.shared else planned.blocks()

        with self._stack:
            texts = self._descriptions()
            needed = comm.together("load_state: compare", compare)
            checkpoint, planned = opened[0], made[0]
            self._verify(checkpoint, needed)
            before, files = checkpoint.meter.count, sum(d.record.size for d, _ in checkpoint.shares.values())
            with comm.shown(f"loading {self.place.name}", lambda: (checkpoint.meter.count - before, files)):
                comm.together("load_state: restore", planned.apply)
            return checkpoint.manifest, planned

    def _descriptions(self) -> dict[str, bytes]:
        """Return name -> content of the JSON files. Ranks that see the same files read a share each."""
        comm = self.comm

        def read() -> dict[str, bytes]:
            self._open()
            ranks = sharers(comm, self._near)
            share = ranks.index(comm.rank)
            return descriptions(
                self._manifest, self._near, listed(self._near), share=share, shares=len(ranks)
            )

        parts = comm.together("load_state: read", read)
        return {name: text for rank in sharers(comm, self._near) for name, text in parts[rank].items()}

    def _open(self) -> None:
        """Find the manifest, and the folder or local cache of its files."""
        place, save_id = self.place, self.save_id
        manifest = next((each for each in manifests(place) if each.save_id == save_id), None)
        if manifest is None:
            if save_id is not None:  # replaced meanwhile: the caller searches again
                raise damaged(place, f"{save_id} is there no more")
            manifest = read_manifest(place)  # raises the error that names the damage
        home = place.at(manifest.save_id)
        if first_here(self.comm, place):
            home = self._stack.enter_context(reading(place, manifest.save_id))
        self._manifest, self._near = manifest, home.local_cache(self.nonce)

    def _verify(self, checkpoint: Checkpoint, needed: Sequence[set[Block]]) -> None:
        """Verify the needed blocks; ranks that see the same files verify a share each."""
        comm = self.comm
        ranks = sharers(comm, self._near)
        near = self._near
        blocks = checkpoint.blocks if near.shared else sorted(set().union(*(needed[rank] for rank in ranks)))
        share, shares = ranks.index(comm.rank), len(ranks)
        mine = blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]
        before, total = checkpoint.meter.count, checkpoint.bytes_of(mine)
        with comm.shown(f"verifying {self.place.name}", lambda: (checkpoint.meter.count - before, total)):
            comm.together("load_state: verify", lambda: checkpoint.verify(mine))
        checkpoint.note_verified(blocks)
