"""Optimizers that cannot step flat pieces of parameters, as DeepSpeed needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core import requires_closure, step_granularity
from accel_deepspeed.placeholders import DummyOptim

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

__all__ = ["unserved"]


def unserved(optimizer: Optimizer, device: torch.device, *, flat: bool) -> str | None:
    """Return the reason why the optimizer would step wrongly, with its remedy; None if it steps rightly.

    Args:
        optimizer: the optimizer that the user prepares.
        device: the device that it will step on.
        flat: parameters are laid end to end, and each rank steps a range.
    """
    name = type(optimizer).__name__
    # The engine makes the optimizers of its JSON, and knows the classes of deepspeed.ops.
    if isinstance(optimizer, DummyOptim):
        return None
    if requires_closure(optimizer):
        return (
            f"{name} evaluates the loss several times a step; DeepSpeed's engine cannot\n"
            "use an optimizer that needs no closure, such as AdamW, or strategy ddp"
        )
    if flat and not _is_deepspeeds(optimizer) and step_granularity(optimizer, device) != "element":
        return (
            f"{name} needs whole parameters, or fails on small tensors, and DeepSpeed steps parameters end to"
            " end, each rank a range\n"
            "use an optimizer that steps element by element, such as AdamW, or strategy ddp; if this"
            f" {name} does, set its attribute: optimizer.elementwise = True"
        )
    return None


def _is_deepspeeds(optimizer: Optimizer) -> bool:
    """Return whether the class is one of DeepSpeed's, of which some need their own device's kernels."""
    return type(optimizer).__module__.startswith("deepspeed.ops.")
