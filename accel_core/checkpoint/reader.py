"""Open and verify the files of a checkpoint, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from accel_core.checkpoint.disks import files_are_elsewhere, nodes_without
from accel_core.checkpoint.files import DataFile, damaged, understanding
from accel_core.checkpoint.manifest import MANIFEST, Manifest, folder_of_files, read_manifest
from accel_core.checkpoint.stored import Place, place
from accel_core.distributed.progress import show_progress
from accel_core.errors import CheckpointError

__all__ = ["CheckpointFiles"]

AT_ONCE: Final = 8
"""Number of blocks that are asked of a store at the same time."""


@frozen
class CheckpointFiles:
    """An opened checkpoint. Only what its manifest vouches for is ever looked at.

    state: what all ranks shared, still encoded; shares: rank -> its data file and index. Where nodes had
    disks of their own, the files of other nodes may be absent.
    """

    folder: Place
    manifest: Manifest
    state: Mapping[str, Any]
    shares: Mapping[int, tuple[DataFile, Mapping[str, Any]]]

    @classmethod
    def open(cls, folder: str | os.PathLike[str] | Place) -> CheckpointFiles:
        """Open the checkpoint in `folder`, a path or a URL, its small files verified.

        Raises:
            CheckpointError: it is not a checkpoint, or a file is missing or damaged; the message names it.
        """
        folder = place(folder)
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
    def _of(cls, folder: Place, manifest: Manifest) -> CheckpointFiles:
        home = folder_of_files(folder, manifest)
        is_part = bool(manifest.domains) and isinstance(folder, Path)

        def opened(name: str) -> DataFile:
            with understanding(folder / MANIFEST):
                record = manifest.files[name]
            return DataFile(home / name, record)

        state, shares = opened("state.json").json(), {}
        for rank in range(manifest.world["size"]):
            names = f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"
            if is_part and not any((home / name).exists() for name in names):
                continue
            data, file = map(opened, names)
            index = file.json()
            with understanding(file.path):
                data.check(index["blocks"])
            shares[rank] = data, index
        return CheckpointFiles(folder, manifest, state, shares)

    @property
    def absent(self) -> str:
        """In words, the nodes whose files are not in this folder; "" if all are."""
        return nodes_without(self.manifest, self.shares)

    def lacks(self, what: str) -> CheckpointError:
        """Return the error for a part that is on another node."""
        return files_are_elsewhere(self.folder, what, self.absent)

    def verify(self, share: int, shares: int) -> None:
        """Compare every block of this share of the data with its digest.

        Raises:
            CheckpointError: a block is not what was written.
        """
        blocks = [
            (data, number, digest)
            for data, index in self.shares.values()
            for number, digest in enumerate(index["blocks"])
        ]
        mine = blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]
        total = sum(file.size_of(number) for file, number, _ in mine)

        def check(block: tuple[DataFile, int, str]) -> None:
            file, number, digest = block
            if file.block(number) != digest:
                raise damaged(file.path, f"block {number} is not what was written")

        with show_progress(f"verifying {self.folder.name}", DataFile.measured(total)):
            if isinstance(self.folder, Path):
                for block in mine:
                    check(block)
            else:
                _at_once(check, mine)


def _at_once(check: Callable[[Any], None], blocks: Iterable[Any]) -> None:
    """Check blocks of a store, each of which takes a while to come."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for _ in pool.map(check, blocks):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
