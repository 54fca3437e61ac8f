"""The weights of a checkpoint, without a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_core.checkpoint.places import storage_at
from accel_core.errors import CheckpointError
from accel_core.storage.files import malformed_as_damaged
from accel_core.storage.opened import open_checkpoint
from accel_core.storage.tensors import Checkpoint

if TYPE_CHECKING:
    from accel_core.storage.tensors import Stored


def stored_weights(folder: str | os.PathLike[str]) -> Iterator[tuple[list[str], Stored]]:
    """Yield (all names, stored weight) for each weight of a checkpoint's only model.

    No run is needed. The whole checkpoint is verified first, and no weight is loaded. A stored weight has
    `shape`, `dtype` (torch's name without the prefix), `tensor()`, `read(target)`, and `place`: (file, start
    in bytes) if the weight is contiguous in one file.

    Raises:
        CheckpointError: the folder is not a checkpoint, is damaged, has several models, or has a weight that
            only the plugin that saved it can read.
    """
    with open_checkpoint(storage_at(folder)) as files:
        checkpoint = Checkpoint.with_tensors(files)
        checkpoint.verify(checkpoint.blocks)
        with malformed_as_damaged(checkpoint.place):
            models = [(unit, told["models"]) for unit, told in checkpoint.state["units"].items()]
            if len(models) != 1 or models[0][1] != 1:
                raise CheckpointError(
                    f"{folder} has {sum(number for _, number in models)} models, of units"
                    f" {', '.join(name for name, _ in models)}; one was asked for\n"
                    f"write them as files of their own: accel checkpoint export {folder} TARGET",
                    path=str(folder),
                )
            yield from weights_of_unit(checkpoint, models[0][0])


def weights_of_unit(
    checkpoint: Checkpoint, unit: str, prefix: str = ""
) -> Iterator[tuple[list[str], Stored]]:
    """Yield (all names, stored weight) for each weight of a unit whose names begin with `prefix`.

    Names are yielded without the prefix.

    Raises:
        CheckpointError: only the plugin that saved a weight can read it.
    """
    for names, stored in named_weights(checkpoint, unit):
        keys = [key for key in names if key.startswith(prefix)]
        if keys:
            if stored.layout is not None:
                only = "which only the plugin that saved it reads"
                raise CheckpointError(
                    f"{unit}: {names[0]} has layout {stored.layout}, {only}\n"
                    "load the checkpoint in a run with that plugin, and use save_model there",
                    path=str(checkpoint.place),
                )
            yield [key.removeprefix(prefix) for key in keys], stored


def named_weights(checkpoint: Checkpoint, unit: str) -> Iterator[tuple[list[str], Stored]]:
    """Yield (all names, stored tensor) for each stored parameter and buffer of a unit."""
    names: dict[str, list[str]] = {}
    for alias, name in checkpoint.state["units"][unit]["aliases"].items():
        names.setdefault(name, [name]).append(alias)
    for (owner, key), stored in checkpoint.tensors.items():
        sort, _, name = key.partition("/")
        if (owner, sort) == (unit, "model"):
            yield names.get(name, [name]), stored
