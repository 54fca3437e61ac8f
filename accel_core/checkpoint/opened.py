"""The files of a checkpoint, opened and verified. Imports no torch: that comes when tensors are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from accel_core.checkpoint.files import MANIFEST, DataFile, Manifest, damaged, read_manifest

__all__ = ["Opened"]


@frozen
class Opened:
    """An opened checkpoint. Only what its manifest vouches for is ever looked at.

    state: what all ranks shared, still encoded; shares: each rank's data file and index, by rank.
    """

    folder: Path
    manifest: Manifest
    state: Mapping[str, Any]
    shares: Sequence[tuple[DataFile, Mapping[str, Any]]]

    @classmethod
    def open(cls, folder: Path) -> Opened:
        """Open the checkpoint in `folder`, its small files verified.

        Raises:
            CheckpointError: it is none, or a file is missing or damaged; the message names it.
        """
        manifest = read_manifest(folder)
        path = folder / MANIFEST

        def opened(name: str) -> DataFile:
            return DataFile(folder / name, manifest.files[name])

        shares = []
        try:
            state = opened("state.json").json()
            for rank in range(manifest.world["size"]):
                data, file = opened(f"rank-{rank:05d}.safetensors"), opened(f"rank-{rank:05d}.json")
                path, index = file.path, file.json()
                data.check(index["blocks"])
                shares.append((data, index))
        except (KeyError, ValueError, TypeError) as error:
            raise damaged(path, f"it cannot be understood ({error!r})") from error
        return cls(folder, manifest, state, shares)

    @property
    def blocks(self) -> list[tuple[DataFile, int, str]]:
        """Of all data files: (file, number of the block, its digest)."""
        return [
            (data, number, digest)
            for data, index in self.shares
            for number, digest in enumerate(index["blocks"])
        ]

    def verify(self, share: int, shares: int) -> None:
        """Compare every block of this share of the data with its digest.

        Raises:
            CheckpointError: a block is not what was written.
        """
        for file, number, digest in self.blocks[share::shares]:
            if file.block(number) != digest:
                raise damaged(file.path, f"block {number} is not what was written")
