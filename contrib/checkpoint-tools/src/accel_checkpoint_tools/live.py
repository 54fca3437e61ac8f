"""Loads foreign checkpoints into a running script."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_checkpoint_tools import accelerate, dcp, deepspeed
from accel_checkpoint_tools.contents import Contents
from accel_core import Accelerator, ops

__all__ = ["load_accelerate", "load_dcp", "load_deepspeed"]

Read = Callable[[Contents], list[str]]


def load_accelerate(
    accelerator: Accelerator, folder: str | os.PathLike[str], into: str | os.PathLike[str]
) -> list[str]:
    """Load what Accelerate 1.x's `save_state` wrote to `folder`.

    Collective; objects are prepared by now.

    The imported state is kept as the checkpoint `into`. Runs no code found in `folder`. Returns what is
    left out.

    Raises:
        CheckpointError: it is damaged, or does not fit what is prepared; nothing is loaded then.
    """
    return _load(accelerator, into, lambda contents: accelerate.read(Path(folder), contents))


def load_dcp(
    accelerator: Accelerator,
    folder: str | os.PathLike[str],
    into: str | os.PathLike[str],
    *,
    unit: str | None = None,
    model: str = "model",
    optimizer: str = "optimizer",
) -> list[str]:
    """Load what `torch.distributed.checkpoint.save` wrote, like `load_accelerate`.

    unit: to load into; default: the only one. model, optimizer: their keys in what was saved.
    """

    def read(contents: Contents) -> list[str]:
        name = unit or next(iter(contents.state["units"]))
        return dcp.read(Path(folder), contents, name, model, optimizer)

    return _load(accelerator, into, read)


def load_deepspeed(
    accelerator: Accelerator,
    folder: str | os.PathLike[str],
    into: str | os.PathLike[str],
    *,
    unit: str | None = None,
) -> list[str]:
    """Load what DeepSpeed's `save_checkpoint` wrote, like `load_accelerate`.

    Any ZeRO stage, and universal checkpoints made of one.

    unit: to load into; default: the only one.
    """

    def read(contents: Contents) -> list[str]:
        return deepspeed.read(Path(folder), contents, unit or next(iter(contents.state["units"])))

    return _load(accelerator, into, read)


def _load(accelerator: Accelerator, into: str | os.PathLike[str], read: Read) -> list[str]:
    into = Path(into).expanduser()
    # It says what this run is made of: core saves the random numbers of all ranks.
    like = Accelerator.save_state(accelerator, into.with_name(f"{into.name}.like"))
    told: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            with Contents.open(like) as contents:
                told[0] = read(contents)
                contents.write(into)
        except Exception as error:  # whatever it is, the other ranks are waiting for our word
            told[1] = error
        shutil.rmtree(like)
    left_out: list[str]
    left_out, problem = ops.broadcast_object_list(told, run=accelerator.run)
    if problem is not None:
        raise problem
    accelerator.load_state(into)
    return left_out
