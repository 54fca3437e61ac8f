"""Open and verify the files of a checkpoint, without torch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, TypeAlias, TypeVar

from attrs import frozen

from accel_core.checkpoint.disks import files_are_elsewhere, nodes_without
from accel_core.checkpoint.files import FETCHED_BLOCKS, DataFile, damaged, understanding
from accel_core.checkpoint.manifest import MANIFEST, Manifest, folder_of_files, read_manifest
from accel_core.checkpoint.node_copy import NodeCopy
from accel_core.checkpoint.stored import Place, place
from accel_core.checkpoint.stored_commit import require_room, spool
from accel_core.distributed.progress import show_progress
from accel_core.errors import CheckpointError

AT_ONCE: Final = 8
"""Number of requests that are made of a store at the same time."""
Block: TypeAlias = tuple[int, int]
"""Rank whose data file it is in, and its number there."""
R = TypeVar("R")


@frozen
class CheckpointFiles:
    """An opened checkpoint. Only what its manifest vouches for is ever looked at.

    state: what all ranks shared, still encoded; shares: rank -> its data file and index. Where nodes had
    disks of their own, the files of other nodes may be absent. node_copy: of a store, what has been read.
    """

    folder: Place
    manifest: Manifest
    state: Mapping[str, Any]
    shares: Mapping[int, tuple[DataFile, dict[str, Any]]]
    node_copy: NodeCopy

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
        is_part, is_local, sizes = bool(manifest.domains), isinstance(folder, Path), dict[str, int]()
        node_copy = NodeCopy(partial(spool, 0), sizes)

        def opened(name: str) -> DataFile:
            with understanding(folder / MANIFEST):
                record = manifest.files[name]
            return DataFile(home / name, record, None if is_local else node_copy)

        state, shares = opened("state.json").json(), {}
        for rank in range(manifest.world["size"]):
            names = f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"
            if is_part and is_local and not any((home / name).exists() for name in names):
                continue
            data, file = map(opened, names)
            sizes[names[0]] = data.record.size
            index = file.json()
            with understanding(file.path):
                data.check(index["blocks"])
            shares[rank] = data, index
        return CheckpointFiles(folder, manifest, state, shares, node_copy)

    @property
    def absent(self) -> str:
        """In words, the nodes whose files are not in this folder; "" if all are."""
        return nodes_without(self.manifest, self.shares)

    def lacks(self, what: str) -> CheckpointError:
        """Return the error for a part that is on another node."""
        return files_are_elsewhere(self.folder, what, self.absent)

    @property
    def blocks(self) -> list[Block]:
        """All blocks of the data files."""
        return [(rank, number) for rank, (data, _) in self.shares.items() for number in data.blocks]

    @property
    def fetched(self) -> set[Block]:
        """The blocks that are in the copy."""
        return {(rank, number) for rank, (data, _) in self.shares.items() for number in data.fetched}

    def add_fetched(self, blocks: Iterable[Block]) -> None:
        """Count blocks that other ranks of this node have brought into the copy."""
        for rank, number in blocks:
            self.shares[rank][0].fetched.add(number)

    def described(
        self, rank: int, read: Callable[[Mapping[str, Any]], R]
    ) -> Iterator[tuple[str, str, R, Any]]:
        """Yield (unit, key, outline, where) of each tensor of a rank, unchecked.

        read: gives what stands for an outline, a mapping as docs/checkpoint-format.md has it; called once for
        each. where: start of the whole tensor in the data file, or a list of `[offset, shape, start]`.

        Raises:
            AttributeError, LookupError, TypeError, ValueError: no save writes this.
        """
        _, index = self.shares[rank]
        outlines = dict(enumerate(map(read, index["outlines"])))  # a list would take -1, too
        for unit, keys in index["tensors"].items():
            for key, (number, where) in keys.items():
                yield unit, key, outlines[number], where

    def verify(self, share: int, shares: int, blocks: Sequence[Block] | None = None) -> None:
        """Compare every block of this share of the data with its digest.

        blocks: the data, if not all blocks of all files. What a store has of them is in `node_copy` then.

        Raises:
            CheckpointError: a block is not what was written, or the disk has no room for the copy.
        """
        if blocks is None:
            blocks = self.blocks
            self.require_room(blocks)
        mine = blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]
        total = self._bytes_of(mine)
        with show_progress(f"verifying {self.folder.name}", DataFile.measured(total)):
            if isinstance(self.folder, Path):
                for rank, number in mine:
                    file, index = self.shares[rank]
                    if file.block(number) != index["blocks"][number]:
                        raise damaged(file.path, f"block {number} is not what was written")
            elif mine:
                self._bring(mine)

    def require_room(self, blocks: Iterable[Block]) -> None:
        """Raise UnreadableError if the disk cannot take these blocks of a store."""
        if not isinstance(self.folder, Path):
            require_room(self.node_copy.folder, self._bytes_of(blocks))

    def _bytes_of(self, blocks: Iterable[Block]) -> int:
        return sum(self.shares[rank][0].size_of(number) for rank, number in blocks)

    def _bring(self, blocks: Iterable[Block]) -> None:
        """Bring blocks from a store, by several requests at a time."""
        groups = groupby(blocks, lambda block: (block[0], block[1] // FETCHED_BLOCKS))
        requests = [(rank, [number for _, number in group]) for (rank, _), group in groups]
        _do_at_once([partial(self.shares[rank][0].fetch, numbers) for rank, numbers in requests])


def _do_at_once(actions: Iterable[Callable[[], object]]) -> None:
    """Do all of these, some at a time; raise the first error.

    Nothing waits for a store then: neither this, nor the end of the process, as with a pool of threads.
    """
    left = deque(actions)
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def next_one() -> Callable[[], object] | None:
        with suppress(IndexError):
            return left.popleft()
        return None

    def work() -> None:
        error = None
        try:
            while (action := next_one()) is not None:
                action()
        except BaseException as raised:  # the caller waits for it
            error = raised
        ended.put(error)

    threads = min(AT_ONCE, len(left))
    try:
        for _ in range(threads):
            Thread(target=copy_context().run, args=(work,), name="fetch", daemon=True).start()
        for _ in range(threads):
            if (error := ended.get()) is not None:
                raise error
    finally:
        left.clear()
