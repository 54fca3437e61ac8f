"""What `prepare` returns for optimizers."""

from __future__ import annotations

from typing import Any

from accel_compat.refusing import unserved
from accel_core import PreparedOptimizer as AcceleratedOptimizer

from .utils.operations import send_to_device

__all__ = ["AcceleratedOptimizer", "move_to_device"]


def move_to_device(state: Any, device: Any) -> Any:
    """A state with its tensors on the device."""
    return send_to_device(state, device)


__getattr__ = unserved(__name__)
