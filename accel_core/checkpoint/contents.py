"""A checkpoint as plain values, for converters, which have no run."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attrs import asdict, define, evolve

from accel_core.checkpoint.collect import Collected
from accel_core.checkpoint.commit import begin, discard, locate, partial_folder, publish, replaced
from accel_core.checkpoint.files import as_json
from accel_core.checkpoint.layout import Layout
from accel_core.checkpoint.manifest import manifest_of, write_manifest
from accel_core.checkpoint.paths import local_path
from accel_core.checkpoint.pending_save import Share
from accel_core.checkpoint.read import Checkpoint
from accel_core.checkpoint.stored import place
from accel_core.checkpoint.writer import end_writing, new_save_id
from accel_core.contract.state import Leaf, whole


@define
class CheckpointContents:
    """All that docs/checkpoint-format.md lists, decoded.

    members: of the manifest. state: of `state.json`. ranks: the `state` of each rank. leaves: whole tensors
    by (unit, key), without those that `state` and `ranks` hold themselves.
    """

    members: dict[str, Any]
    state: dict[str, Any]
    ranks: list[dict[str, Any]]
    leaves: dict[tuple[str, str], Leaf]

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> CheckpointContents:
        """Read the checkpoint `folder`, a path or a URL, into memory, verified.

        Raises:
            CheckpointError: it is not a checkpoint, or is damaged.
        """
        checkpoint = Checkpoint.open(locate(place(folder)))
        checkpoint.verify(0, 1)
        leaves = {
            key: evolve(whole(stored.tensor(), kind=stored.kind), layout=stored.layout)
            for key, stored in checkpoint.tensors.items()
            if key[0]
        }
        world = range(checkpoint.manifest.world["size"])
        ranks = [checkpoint.decode(checkpoint.rank_state(rank), f"rank[{rank}]") for rank in world]
        members = {key: value for key, value in checkpoint.manifest.members.items() if key != "checksum"}
        return cls(members, checkpoint.decode(checkpoint.state, "state"), ranks, leaves)

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Save as the checkpoint `folder`, as atomically as a run does.

        Returns the folder.

        Raises:
            CheckpointError: something is not plain data, or the folder is there and is not a checkpoint.
        """
        target, save_id = Path(os.path.realpath(local_path(folder))), new_save_id(self.members["run_id"])
        shares = [self._share(rank, save_id) for rank in range(len(self.ranks))]
        seen = begin(target, save_id, sum(share.size for share in shares))
        beside = partial_folder(target, save_id)
        try:
            files = {name: asdict(made) for share in shares for name, made in share.write(beside).items()}
            time = datetime.now(timezone.utc).isoformat(timespec="seconds")
            named: dict[str, Any] = {"save_id": save_id, "name": None, "domains": [], "time": time}
            write_manifest(beside, manifest_of({**self.members, **named, "files": files}))
            publish(target, save_id, seen=seen, replace=True, ranks=range(len(self.ranks)))
        finally:
            for left in replaced(target, save_id):  # published, or of no use
                discard(left, target)
            end_writing(save_id)
        return target

    def _share(self, rank: int, save_id: str) -> Share:
        found, shared = Collected(), None
        if rank == 0:
            for key, leaf in self.leaves.items():
                found.add(key, leaf)
            shared = as_json(found.encode(self.state, "state"))
        own = as_json(found.encode(self.ranks[rank], f"rank[{rank}]"))
        writes = {key: list(declared.boxes) for key, declared in found.declared.items()}
        layout = Layout.of(save_id, found.declared, writes, found.leaves)
        body = layout.read(found.leaves)
        return Share(rank, layout.head, body, layout.size, own, layout.index, shared)
