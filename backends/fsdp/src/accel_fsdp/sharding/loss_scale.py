"""fp16's loss scaler for gradients in parts: ranks agree whether any part overflowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, proxy

import torch

from accel_core import LossScaler

if TYPE_CHECKING:
    from torch import Tensor

    from accel_core import Run

__all__ = ["ShardedLossScaler", "loss_scaler_of"]

_made: Final[WeakKeyDictionary[Run, ShardedLossScaler]] = WeakKeyDictionary()


def loss_scaler_of(run: Run) -> ShardedLossScaler:
    """Return the run's loss scaler, the same for all its units: a loss may train several of them."""
    if run not in _made:
        _made[run] = ShardedLossScaler(run)
    return _made[run]


class ShardedLossScaler(LossScaler):
    """All ranks apply a step, or none.

    As torch's ShardedGradScaler it overrides the method that looks for overflows.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.device.type, **run.config.grad_scaler.to_kwargs())
        self._run: Run = proxy(run)  # groups must not outlive the run
        self.is_collective = run.world.size > 1

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        device = found_inf.device
        if device.type != "cpu" and _has_gradients_on_cpu(optimizer):
            # torch would copy the scale to the CPU without waiting, and read it there at once.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        # Gradients may have the dtype in which they were reduced.
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self.is_collective)
        if not self.is_collective:
            return found
        found = found or {found_inf.device: found_inf}  # a rank may have none of the gradients
        here = torch.stack([each.to(device) for each in found.values()]).amax()
        anywhere = self._run.collectives("world").all_reduce(here, "max")
        return {device: anywhere.to(device) for device in found}


def _has_gradients_on_cpu(optimizer: Any) -> bool:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return any(parameter.grad is not None and parameter.grad.is_cpu for parameter in parameters)
