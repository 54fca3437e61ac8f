"""The device itself: what differs from core's generic device, which asks torch for all the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_core import hooks, implements
from accel_example_device import runtime

if TYPE_CHECKING:
    from accel_core import Run, World

__all__ = ["ExampleDevice"]


class ExampleDevice:
    """Device `example`; `self.below` answers as if this class were not there."""

    below: Any

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        return torch.device("example", 0)  # each process sees one

    @implements(hooks.communication_backend)
    def communication_backend(self, device: torch.device) -> Mapping[str, str]:
        return {"example": "exccl"}

    @implements(hooks.environment_report)
    def environment_report(self) -> Mapping[str, str]:
        return {"example runtime": f"pretended, log level {runtime.log_level}"}
