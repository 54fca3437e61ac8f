"""An opened checkpoint: its JSON files are verified and read, its tensors not yet. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from attrs import frozen

from accel_core.errors import CheckpointError
from accel_core.storage.commit import commits, read_manifest
from accel_core.storage.files import DataFile, Meter, damaged, listed, malformed_as_damaged

if TYPE_CHECKING:
    from accel_core.storage.commit import Manifest
    from accel_core.storage.protocols import Storage

Block: TypeAlias = tuple[int, int]
"""(rank of the data file, number of the block in the file)."""
R = TypeVar("R")


@frozen(eq=False)
class Opened:
    """An opened checkpoint. Only files that the manifest lists are read."""

    place: Storage
    manifest: Manifest
    state: Mapping[str, Any]
    """State that all ranks shared, still encoded."""
    shares: Mapping[int, tuple[DataFile, dict[str, Any]]]
    """Rank -> its data file and index. If nodes had disks of their own, other nodes' files may be absent."""
    meter: Meter
    """Counts the bytes read."""

    @classmethod
    def of(
        cls, place: Storage, manifest: Manifest, home: Storage, texts: Mapping[str, bytes] | None = None
    ) -> Opened:
        """Open the checkpoint of this manifest.

        Args:
            place: the checkpoint's folder.
            manifest: the commit to open.
            home: the folder of the save's files, or a copy of the folder.
            texts: verified content of the JSON files (see `descriptions`). None: this call reads all of them.

        Raises:
            CheckpointError: a file is missing or damaged; the message names the file.
        """
        entries, meter = listed(home), Meter()
        with malformed_as_damaged(f"{place}/manifest-{manifest.number:08d}.json"):
            texts = descriptions(manifest, home, entries) if texts is None else texts
            file = _file(manifest, home, entries, "state.json")
            with malformed_as_damaged(file):
                state = json.loads(texts[file.name])
            shares = {}
            for rank in range(manifest.world["size"]):
                names = f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"
                # Absent files are allowed only if nodes had disks of their own: `lacks` then names the node.
                if manifest.domains and not any(name in entries for name in names):
                    continue
                data, file = (_file(manifest, home, entries, name, meter) for name in names)
                with malformed_as_damaged(file):
                    index = json.loads(texts[file.name])
                    data.check(index["blocks"])
                shares[rank] = data, index
        return cls(place, manifest, state, shares, meter)

    @property
    def absent(self) -> str:
        """Text that lists the nodes whose files are not in this folder; "" if no files are absent."""
        nodes = {
            node: [rank for rank in there if rank not in self.shares]
            for node, there in enumerate(self.manifest.domains)
        }
        return "; ".join(
            f"node {node}, with the files of rank(s) {', '.join(map(str, ranks))}"
            for node, ranks in nodes.items()
            if ranks
        )

    def lacks(self, what: str) -> CheckpointError:
        """Return the error for a part that is on another node."""
        return CheckpointError(
            f"{self.place} lacks {what}: it was saved on the disks of several nodes, and what {self.absent},"
            f" wrote is not here\ncopy the files of {self.place.name} on that node into this folder",
            path=str(self.place),
        )

    @property
    def blocks(self) -> list[Block]:
        """All blocks of the data files."""
        return [(rank, number) for rank, (data, _) in self.shares.items() for number in data.blocks]

    def verify(self, blocks: Iterable[Block]) -> None:
        """Read these blocks and compare them with their digests. Raises CheckpointError."""
        for data, numbers in self._by_file(blocks):
            data.verify(numbers)

    def note_verified(self, blocks: Iterable[Block]) -> None:
        """Mark blocks as verified, because other ranks have verified them."""
        for data, numbers in self._by_file(blocks):
            data.verified.update(numbers)

    def bytes_of(self, blocks: Iterable[Block]) -> int:
        """Return the total size of blocks in bytes."""
        return sum(self.shares[rank][0].size_of(number) for rank, number in blocks)

    def _by_file(self, blocks: Iterable[Block]) -> list[tuple[DataFile, Sequence[int]]]:
        numbers: dict[int, list[int]] = {}
        for rank, number in blocks:
            numbers.setdefault(rank, []).append(number)
        return [(self.shares[rank][0], each) for rank, each in numbers.items()]

    def described(
        self, rank: int, read: Callable[[Mapping[str, Any]], R]
    ) -> Iterator[tuple[str, str, R, Any]]:
        """Yield (unit, key, outline, position) of each tensor of a rank, unchecked.

        A position is the start of the whole tensor in the data file, or a list of `[offset, shape, start]`.

        Args:
            rank: the rank that wrote the tensors.
            read: converts an outline (docs/checkpoint-format.md) to the yielded value, once per outline.

        Raises:
            AttributeError, LookupError, TypeError, ValueError: the index is not as a save writes it.
        """
        _, index = self.shares[rank]
        outlines = dict(enumerate(map(read, index["outlines"])))  # a list would accept the number -1
        for unit, keys in index["tensors"].items():
            for key, (number, where) in keys.items():
                yield unit, key, outlines[number], where


def descriptions(
    manifest: Manifest, home: Storage, entries: Mapping[str, int | None], *, share: int = 0, shares: int = 1
) -> dict[str, bytes]:
    """Return name -> verified content of the JSON files of a save, or of every `shares`-th file.

    If nodes had disks of their own, the files of other nodes may be absent.

    Args:
        manifest: the commit of the save.
        home: the folder of the files.
        entries: name -> bytes of the files in `home`.
        share: number of the share to read.
        shares: number of shares into which the files are split.

    Raises:
        CheckpointError: a file is missing, damaged, or cannot be read.
    """
    ranks = [name for name in sorted(manifest.files) if name.endswith(".json") and name != "state.json"]
    there = ["state.json", *(name for name in ranks if name in entries or not manifest.domains)]
    return {name: _file(manifest, home, entries, name).content() for name in there[share::shares]}


def _file(
    manifest: Manifest,
    home: Storage,
    entries: Mapping[str, int | None],
    name: str,
    meter: Meter | None = None,
) -> DataFile:
    """Return a file of the save. Raises CheckpointError if the file is missing or has another size."""
    file = DataFile(home, name, manifest.files[name], meter or Meter())
    if entries.get(name) != file.record.size:
        there = f"it is not a file of {file.record.size} bytes" if name in entries else "it is not there"
        raise damaged(file, there)
    return file


@contextmanager
def open_checkpoint(place: Storage) -> Iterator[Opened]:
    """Open a checkpoint in a single process, claimed against removal if the process may write there.

    Raises:
        CheckpointError: the folder is not a checkpoint, or its manifest or a JSON file is damaged.
    """
    with ExitStack() as stack:
        before: Collection[str] = ()
        while True:
            manifest = read_manifest(place)
            home = stack.enter_context(reading(place, manifest.save_id))
            if manifest.number not in commits(place):
                # Replaced before the claim, which a saver that removes manifests, then looks for claims, may
                # not have seen.
                stack.close()
                continue
            try:
                found = Opened.of(place, manifest, home.local_cache(token_hex(8)))
                break
            except CheckpointError:
                if manifest.save_id in before:
                    raise
                before = {manifest.save_id}  # another save may have replaced it: look once more
                stack.close()
        yield found


@contextmanager
def reading(place: Storage, save_id: str) -> Iterator[Storage]:
    """Return the folder of a save, claimed against removal if this process may write there."""
    home = place.at(save_id)
    with ExitStack() as stack:
        try:
            if home.list():  # a claim would create a missing folder
                stack.enter_context(home.claim())
        except OSError:
            pass
        yield home
