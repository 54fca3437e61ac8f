"""A checkpoint that is being read: its files, checked, and the tensors in them, by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from accel_core.checkpoint.codec import DTYPES, decode
from accel_core.checkpoint.files import MANIFEST, DataFile, Manifest, damaged, read_manifest
from accel_core.checkpoint.leaf import Kind, Leaf, whole
from accel_core.checkpoint.plan import Box, Key, intersect, tiling_problem

__all__ = ["Checkpoint", "Stored"]


@frozen
class Stored:
    """A tensor of the checkpoint: what it is, and in which file each box of it starts where."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    layout: str | None
    boxes: list[tuple[Box, DataFile, int]] = field(factory=list, eq=False)

    def fill(self, leaf: Leaf) -> None:
        """Overwrite the parts of the leaf that this rank holds."""
        for offset, tensor in leaf.shards:
            wanted = Box(tuple(offset), tuple(tensor.shape))
            for box, file, start in self.boxes:
                source = file.tensor(self.dtype, box.shape, start)
                if box == wanted:
                    tensor.copy_(source)
                elif common := intersect(box, wanted):
                    tensor[_slices(common, wanted)].copy_(source[_slices(common, box)])


@frozen
class Checkpoint:
    """An opened checkpoint. Only what its manifest vouches for is ever looked at.

    state: what all ranks shared, still encoded; ranks: what each rank had of its own, by rank.
    """

    folder: Path
    manifest: Manifest
    state: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]]
    tensors: Mapping[Key, Stored]
    _blocks: Sequence[tuple[DataFile, int, str]]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open the checkpoint in `folder`, its small files verified.

        Raises:
            CheckpointError: it is none, or a file is missing or damaged; the message names it.
        """
        manifest = read_manifest(folder)
        ranks: list[Any] = []
        tensors: dict[Key, Stored] = {}
        blocks: list[tuple[DataFile, int, str]] = []
        path = folder / MANIFEST

        def opened(name: str) -> DataFile:
            return DataFile(folder / name, manifest.files[name])

        try:
            state = opened("state.json").json()
            for rank in range(manifest.world["size"]):
                data, file = opened(f"rank-{rank:05d}.safetensors"), opened(f"rank-{rank:05d}.json")
                path, index = file.path, file.json()
                data.check(index["blocks"])
                blocks += [(data, number, digest) for number, digest in enumerate(index["blocks"])]
                _add_tensors(tensors, index["tensors"], data)
                ranks.append(index["state"])
            for (unit, key), stored in tensors.items():
                if problem := tiling_problem(stored.shape, [box for box, _, _ in stored.boxes]):
                    raise ValueError(f"{unit}: {key}: {problem}")
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise damaged(path, f"it cannot be understood ({error!r})") from error
        return cls(folder, manifest, state, ranks, tensors, blocks)

    def verify(self, share: int, shares: int) -> None:
        """Compare every block of this share of the data with its digest.

        Raises:
            CheckpointError: a block is not what was written.
        """
        for file, number, digest in self._blocks[share::shares]:
            if file.block(number) != digest:
                raise damaged(file.path, f"block {number} is not what was written")

    def decode(self, value: Any, path: str) -> Any:
        """The value that was encoded, its large tensors read from the data files."""
        return decode(value, path, self._fetch)

    def _fetch(self, key: str) -> Tensor:
        stored = self.tensors["", key]
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        stored.fill(whole(tensor))
        return tensor


def _add_tensors(tensors: dict[Key, Stored], index: Mapping[str, Mapping[str, Any]], data: DataFile) -> None:
    for unit, keys in index.items():
        for key, each in keys.items():
            described = Stored(each["kind"], tuple(each["shape"]), each["dtype"], each.get("layout"))
            stored = tensors.setdefault((unit, key), described)
            if stored != described:
                raise ValueError(f"{key} is described otherwise by another rank")
            for offset, shape, start in each["boxes"]:
                data.tensor(stored.dtype, shape, start)  # it is inside of the file
                stored.boxes.append((Box(tuple(offset), tuple(shape)), data, start))


def _slices(part: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(
        slice(first - start, first - start + size)
        for first, start, size in zip(part.offset, whole.offset, part.shape, strict=True)
    )
