"""Models computed where they do not fit: blocks come and go."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import evolve

from accel_big_models.arranging import arrange
from accel_big_models.away import release
from accel_big_models.composing import values_of
from accel_big_models.hooks import detach, enters_of
from accel_big_models.planning import place_name, plan_from_map
from accel_big_models.plans import HOST
from accel_big_models.swapping import put
from accel_big_models.tenants import tenants_of
from accel_core import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from accel_big_models.plans import Plan

__all__ = ["dispatch", "offload", "undo"]


def dispatch(
    model: nn.Module,
    plan: Plan,
    *,
    folder: str | os.PathLike[str] | None = None,
    mapped: bool = True,
    skip_keys: Sequence[str] = (),
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
        skip_keys: names of arguments, and keys of mappings in inputs and outputs, whose values stay where
            they are, such as a cache whose parts are on the devices that use them.

    Returns:
        The model.

    Raises:
        ConfigError: the model is dispatched already, a weight is on the meta device, or parts that share
            a weight are on two devices.
        AccelError: the disk is full; nothing is changed.
    """
    arrange(model, plan, tenants_of(model, plan), folder, mapped=mapped, skip_keys=skip_keys)
    return model


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
    if to not in HOST:
        raise ConfigError(f"offload: {to!r} is not a place for weights\nwrite 'cpu' or 'disk'")
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    target = torch.device(place_name(device))
    made = evolve(plan_from_map(model, {"": to}, whole=whole), device=target)
    return dispatch(model, made, folder=folder, mapped=mapped)


def undo(model: nn.Module) -> nn.Module:
    """Take off what `dispatch`, `offload` and `load` added; return the model, whole.

    Weights that came and went are in host memory afterwards: those of files as mapped views. The others
    stay on their devices. A model that is not dispatched stays as it is.

    Raises:
        AccelError: a weight was written to while it was not in memory; the model stays as it is.
    """
    engines = {id(enter.engine): enter.engine for enter in enters_of(model) if enter.engine is not None}
    for engine in engines.values():
        engine.leave_all()
    sources = [(weight, weight.fresh()) for engine in engines.values() for weight in engine.weights]
    for engine in engines.values():
        engine.close()
    for weight, source in sources:
        put(weight.tensor, values_of(source))
    for module in model.modules():
        detach(module)
        release(module)
    return model
