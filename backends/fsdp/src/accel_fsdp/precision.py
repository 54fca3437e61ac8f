"""Dtypes of gathered weights, reduced gradients and outputs.

As torch's policy objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from accel_fsdp.checks import DTYPES

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_core import Run
    from accel_fsdp.config import FullyShardedDataParallelPlugin

__all__ = ["SharedScaler", "mixed_precision"]

POLICIES: Final[Mapping[int, type]] = {1: MixedPrecision, 2: MixedPrecisionPolicy}


class SharedScaler(GradScaler):
    """A loss scaler that sees overflows on all ranks, whatever part each holds.

    torch's own ask the mesh and placement of an optimizer's first gradient only, or the ranks of one replica,
    and nobody of other stages.
    """

    takes_half = False
    """True if gradients may be float16, as a policy of version 1 can leave them."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        device = found_inf.device
        if _offloaded(optimizer):
            # torch would copy the scale to the CPU without waiting, and read it there at once.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self.takes_half)
        found = found or {found_inf.device: found_inf}  # a rank may have none of the optimizer's parameters
        anywhere = torch.stack([each.to(device) for each in found.values()]).amax()
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        return {device: anywhere.to(device) for device in found}


def _offloaded(optimizer: Optimizer) -> bool:
    return any(
        p.grad.device.type == "cpu" for g in optimizer.param_groups for p in g["params"] if p.grad is not None
    )


def mixed_precision(config: FullyShardedDataParallelPlugin, run: Run) -> Any:
    """Return the policy of the config, or else the one that fits the run's precision.

    The run's bf16 and fp16 gather weights in it and reduce gradients in float32, as data parallelism
    over whole weights does; a policy given as a word does both in that dtype.
    """
    make, policy = POLICIES[config.fsdp_version], config.mixed_precision_policy
    if policy is None:
        name = run.config.mixed_precision
        if name not in ("bf16", "fp16"):
            return make()
        return make(param_dtype=_dtype(name), reduce_dtype=torch.float32)
    if isinstance(policy, str):
        return make(param_dtype=_dtype(policy), reduce_dtype=_dtype(policy))
    return make(**{key: _dtype(value) if key.endswith("_dtype") else value for key, value in policy.items()})


def _dtype(value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    found: torch.dtype = getattr(torch, DTYPES.get(value, str(value).removeprefix("torch.")))
    return found
