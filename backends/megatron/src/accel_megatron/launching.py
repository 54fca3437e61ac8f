"""Hooks of the launcher, and of the run before CUDA starts. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_core import RunConfig, World

__all__ = ["launch_environment"]


def launch_environment(config: RunConfig, world: World) -> Mapping[str, str]:
    """Ask for one queue: only its order lets ranks that split layers overlap sending."""
    splits = config.parallelism.get("tp", 1) != 1
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if splits else {}
