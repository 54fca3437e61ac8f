"""The files of a checkpoint, opened and verified. Imports no torch: that comes when tensors are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from accel_core.checkpoint.files import MANIFEST, DataFile, Manifest, damaged, read_manifest
from accel_core.errors import CheckpointError

__all__ = ["Opened"]


@frozen
class Opened:
    """An opened checkpoint. Only what its manifest vouches for is ever looked at.

    state: what all ranks shared, still encoded; shares: rank -> its data file and index. Where nodes had
    disks of their own, the files of other nodes may be absent.
    """

    folder: Path
    manifest: Manifest
    state: Mapping[str, Any]
    shares: Mapping[int, tuple[DataFile, Mapping[str, Any]]]

    @classmethod
    def open(cls, folder: Path) -> Opened:
        """Open the checkpoint in `folder`, its small files verified.

        Raises:
            CheckpointError: it is none, or a file is missing or damaged; the message names it.
        """
        manifest = read_manifest(folder)
        while True:
            try:
                return cls._of(folder, manifest)
            except CheckpointError:
                now = read_manifest(folder)
                if now.save_id == manifest.save_id:
                    raise
                manifest = now  # it was replaced by another save meanwhile

    @classmethod
    def _of(cls, folder: Path, manifest: Manifest) -> Opened:
        path = folder / MANIFEST

        def opened(name: str) -> DataFile:
            return DataFile(folder / name, manifest.files[name])

        shares = {}
        try:
            state = opened("state.json").json()
            for rank in range(manifest.world["size"]):
                names = f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"
                if manifest.domains and not any((folder / name).exists() for name in names):
                    continue
                data, file = map(opened, names)
                path, index = file.path, file.json()
                data.check(index["blocks"])
                shares[rank] = data, index
        except (AttributeError, LookupError, ValueError, TypeError, OverflowError) as error:
            raise damaged(path, f"it cannot be understood ({error!r})") from error
        return Opened(folder, manifest, state, shares)

    @property
    def blocks(self) -> list[tuple[DataFile, int, str]]:
        """Of all data files: (file, number of the block, its digest)."""
        return [
            (data, number, digest)
            for data, index in self.shares.values()
            for number, digest in enumerate(index["blocks"])
        ]

    @property
    def absent(self) -> str | None:
        """In words, the files that are not in this folder since they were written on other nodes."""
        nodes = {
            node: lacking
            for node, ranks in enumerate(self.manifest.domains)
            if (lacking := [rank for rank in ranks if rank not in self.shares])
        }
        return (
            "; ".join(
                f"node {node}, with the files of rank(s) {', '.join(map(str, ranks))}"
                for node, ranks in nodes.items()
            )
            or None
        )

    def lacks(self, what: str) -> CheckpointError:
        """What to raise for a part that is on another node."""
        return CheckpointError(
            f"{self.folder} lacks {what}: it was saved on the disks of several nodes, and what {self.absent},"
            f" wrote is not here\ncopy the files of {self.folder.name} on that node into this folder",
            path=str(self.folder),
        )

    def verify(self, share: int, shares: int) -> None:
        """Compare every block of this share of the data with its digest.

        Raises:
            CheckpointError: a block is not what was written.
        """
        for file, number, digest in self.blocks[share::shares]:
            if file.block(number) != digest:
                raise damaged(file.path, f"block {number} is not what was written")
