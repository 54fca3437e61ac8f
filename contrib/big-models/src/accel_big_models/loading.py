"""A checkpoint's weights in their places, straight from file."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from accel_big_models.plans import Plan

__all__ = ["load"]


def load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    plan: Plan | None = None,
    *,
    strict: bool = True,
    mapped: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> nn.Module:
    """Load a checkpoint's weights to the places of a plan, and dispatch the model.

    Nothing is copied on disk. On the CPU, weights are views of the mapped file. Weights on "disk" stay in
    the file; see `dispatch` for how they are computed. The model changes when everything has been read: an
    error leaves it as it was. Weights that the plan puts nowhere else keep their tensors' identity, ties
    and `requires_grad`.

    Args:
        model: on the meta device, as `empty_weights` makes it, or with weights that are overwritten.
        checkpoint: a safetensors file, a file of `torch.save`, an index of shards, a folder with one of
            them, a checkpoint of accel-core, or an offload folder of Accelerate.
        plan: the place of each part; None: all of it on the CPU.
        strict: names that only the model or only the checkpoint has are an error.
        mapped: False reads files instead of mapping them: a file that is cut later then raises an error,
            where a mapped one ends the process.
        progress: called with the bytes that are loaded and those of all.

    Returns:
        The model.

    Raises:
        CheckpointError: a file is damaged or cut, names or shapes differ; names the file and the weights.
    """
    raise NotImplementedError
