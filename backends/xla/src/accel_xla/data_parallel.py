"""Strategy `xla-dp`: each process trains a copy on its XLA device; gradients are averaged once per window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_core import hooks, implements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from accel_core import Run, RunConfig, Unit

__all__ = ["XlaDataParallel"]


class XlaDataParallel:
    """Strategy `xla-dp`. With one process it does nothing."""

    below: Any

    def __init__(self, config: object, run: Run) -> None:
        from torch_xla.core import xla_model

        self.run = run
        self._xm = xla_model

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        if self.run.stack.device.name == "xla":
            return []
        return [f"xla-dp trains on XLA devices, not on {self.run.stack.device.name}; set device: xla"]

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Copy one replica's parameters and buffers to all others. Collective."""
        if self.run.world.size > 1:
            self._xm.broadcast_master_param(model)
        return model

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit: Unit) -> None:
        for optimizer in unit.optimizers:
            self._xm.reduce_gradients(optimizer)
