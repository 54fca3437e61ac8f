"""A checkpoint that is converted: its plain state in memory, its tensors where they are stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from accel_checkpoint_tools.found import nothing_written, of_program
from accel_core import (
    Checkpoint,
    CheckpointError,
    Outline,
    Storage,
    open_checkpoint,
    show_progress,
    storage_at,
    write_checkpoint,
)

__all__ = ["Contents", "Key", "Source", "replaced"]

Key = tuple[str, str]
"""A unit, and `model/NAME`, `optimizer/NAME/KEY` or alike."""


@frozen(eq=False)
class Source:
    """A tensor that is read when it is written elsewhere, and not kept. read: returns all of it."""

    outline: Outline
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor, kind: Any = "like_param") -> Source:
        """Return the source of a tensor that is in memory, or in a mapped file."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(Outline(kind, tuple(tensor.shape), dtype), lambda: tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.outline.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        found: torch.dtype = getattr(torch, self.outline.dtype)
        return found


@define
class Contents:
    """All that docs/checkpoint-format.md lists, decoded.

    members: of the manifest. state: of `state.json`. ranks: the `state` of each rank. tensors: by key,
    without those that `state` and `ranks` hold themselves.
    """

    members: dict[str, Any]
    state: dict[str, Any]
    ranks: list[dict[str, Any]]
    tensors: dict[Key, Source]

    @classmethod
    @contextmanager
    def open(cls, folder: str | os.PathLike[str]) -> Iterator[Contents]:
        """Give the contents of the checkpoint `folder`, a path or a URL, whose tensors are read in here.

        Each byte is verified when it is read.

        Raises:
            CheckpointError: the folder is not a checkpoint, is damaged, or lacks the files of a node.
        """
        with open_checkpoint(storage_at(folder)) as files:
            checkpoint = Checkpoint.with_tensors(files)
            world = range(checkpoint.manifest.world["size"])
            yield cls(
                {name: each for name, each in checkpoint.manifest.members.items() if name != "checksum"},
                checkpoint.decode(checkpoint.state, "state"),
                [checkpoint.decode(checkpoint.rank_state(rank), f"rank[{rank}]") for rank in world],
                {
                    key: Source(Outline(each.kind, each.shape, each.dtype, each.layout), each.tensor)
                    for key, each in checkpoint.tensors.items()
                    if key[0]
                },
            )

    def one_unit(self, unit: str | None) -> str:
        """Return the unit of this name; without a name the only one. Raises CheckpointError."""
        units = list(self.state["units"])
        if unit in units or (unit is None and len(units) == 1):
            return unit or units[0]
        raise CheckpointError(
            f"the checkpoint has the units {', '.join(units)}\nchoose one of them with --unit"
        )

    def require_weights(self, what: str, remedy: str, unit: str | None = None) -> None:
        """Raise CheckpointError if no unit has weights, or this one has none.

        what: names the checkpoint. remedy: as in `nothing_written`.
        """
        keys = [key for key in self.tensors if unit in (None, key[0])]
        if not any(key.startswith("model/") for _, key in keys):
            raise nothing_written(what, "weights of a model", keys, remedy)

    @property
    def without_place(self) -> list[str]:
        """Names state of a program without an Accelerator, for which other formats have no place."""
        values = sum(len(each.get("values", {})) for each in (self.state, *self.ranks))
        return of_program(self.tensors, values)

    def write(self, folder: str | os.PathLike[str]) -> Storage:
        """Save as the checkpoint `folder`, as atomically as a run does. Memory is needed for one tensor.

        Raises:
            CheckpointError: something is not plain data, or the folder is there and is not a checkpoint.
        """
        place, done = storage_at(folder), 0

        def read(key: Key) -> Tensor:
            nonlocal done
            tensor = self.tensors[key].read()
            done += tensor.nbytes
            return tensor

        outlines = {key: each.outline for key, each in self.tensors.items()}
        with show_progress(f"writing {place.name}", lambda: (done, 0)):
            write_checkpoint(place, self.members, self.state, self.ranks, outlines, read)
        return place


def replaced(value: Any, replace: Callable[[Source], Any]) -> Any:
    """Return nested dicts, lists and tuples with what `replace` gives for each source in them."""
    if isinstance(value, Source):
        return replace(value)
    if type(value) is dict:
        return {key: replaced(each, replace) for key, each in value.items()}
    return type(value)(replaced(each, replace) for each in value) if type(value) in (list, tuple) else value
