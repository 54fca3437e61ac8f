"""Dtypes of gathered weights, reduced gradients and outputs.

As torch's policy objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from accel_fsdp.checks import DTYPES

if TYPE_CHECKING:
    from accel_core import Run
    from accel_fsdp.config import FullyShardedDataParallelPlugin

__all__ = ["mixed_precision"]

POLICIES: Final[Mapping[int, type]] = {1: MixedPrecision, 2: MixedPrecisionPolicy}


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
