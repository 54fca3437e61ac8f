# mypy: disable-error-code="empty-body"
"""The hooks that a device implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from accel_core.contract.bound import merge
from accel_core.contract.spec import spec

if TYPE_CHECKING:
    import torch

    from accel_core.contract.world import RandomStream, World

Point = Literal["batch", "backward", "step", "host_read", "state"]


# -- a device, before and as a run is set up ---------------------------------------------------------


@spec("owner")
def select_device(world: World) -> torch.device:
    """Return the device of this process, after making it current.

    Raises if `local_rank` has no device. base: the card's torch device type, index `local_rank`.
    """


@spec("owner")
def capabilities(device: torch.device) -> frozenset[str]:
    """Return the capability words of this chip under this stack, at most the card's `offers`.

    A strategy narrows the device's answer: `self.below.capabilities(device) - {"fp16"}`. If a plugin of the
    stack needs a missing word, core refuses the stack, and names the layer that removed the word.
    """


# -- services of a device ----------------------------------------------------------------------------


@spec("owner")
def memory_stats(device: torch.device) -> Mapping[str, int]:
    """Return bytes by name: allocated, reserved, peak, total, free; unknown values are left out.

    `device` is any device of the type, not only the run's. `free` is the memory that can still be allocated,
    cached memory included.
    """


@spec("owner", per_step=True)
def mark_step(point: Point) -> None:
    """Cut the device's lazily recorded graph here, if it has one.

    Called after a batch is placed (batch), after backward, after an optimizer step (step), before
    core reads a tensor on the host (host_read), and before state is read (state).
    """


@spec("everyone", merge)
def random_streams() -> Mapping[str, RandomStream]:
    """Return name -> random generator of this process. base: python, numpy, torch, and torch's devices."""
