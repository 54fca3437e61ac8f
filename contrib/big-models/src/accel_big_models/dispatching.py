"""Models computed where they do not fit: blocks come and go."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_big_models.plans import Plan

__all__ = ["dispatch", "offload", "undo"]


def dispatch(
    model: nn.Module, plan: Plan, *, folder: str | os.PathLike[str] | None = None, mapped: bool = True
) -> nn.Module:
    """Move a model's weights to their places, and have blocks come and go.

    The model stays the same object, and so does each parameter: its data is on the device while its block
    computes, and in host memory or in a mapped file otherwise. Inputs are moved to the first device, and
    outputs back to where the inputs came from. Threads may call the model at the same time.

    Args:
        model: with all its weights.
        plan: the place of each part.
        folder: for weights that go to disk and are in no file yet; None: a temporary one. What is written
            there is removed when the model is undone or gone.
        mapped: see `load`.

    Returns:
        The model.

    Raises:
        ConfigError: the model is dispatched already, a weight is on the meta device, or parts that share
            a weight are on two devices.
        AccelError: the disk is full; nothing is changed.
    """
    raise NotImplementedError


def offload(
    model: nn.Module,
    to: str = "cpu",
    *,
    device: str | torch.device | None = None,
    whole: Collection[str | type[nn.Module]] | None = None,
    folder: str | os.PathLike[str] | None = None,
    mapped: bool = True,
) -> nn.Module:
    """Keep all of a model's weights in host memory ("cpu") or on disk ("disk").

    They come to `device` block by block.

    Args:
        model: with all its weights.
        to: "cpu" or "disk".
        device: where blocks are computed; None: the current accelerator, or the CPU without one.
        whole: classes of modules that are never divided; see `blocks_of`.
        folder: see `dispatch`.
        mapped: see `load`.

    Returns:
        The model.

    Raises:
        ConfigError, AccelError: as `dispatch` does.
    """
    raise NotImplementedError


def undo(model: nn.Module) -> nn.Module:
    """Take off what `dispatch`, `offload` and `load` added; return the model, whole.

    Weights that came and went are in host memory afterwards: those of files as mapped views. The others
    stay on their devices. A model that is not dispatched stays as it is.
    """
    raise NotImplementedError
