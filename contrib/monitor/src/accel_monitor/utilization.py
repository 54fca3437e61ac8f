"""Model FLOPs utilization: the part of the devices' peak that a run makes use of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from accel_core import AccelError

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["utilization"]

DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
"""Dtypes of the hook `monitor.device_specs`, by words of `mixed_precision`."""


def utilization(run: Run, sample: Mapping[str, Any], flops: Mapping[str, float | None]) -> float | None:
    """Return the utilization in a sampled step; None if a figure for it is not known.

    flops: rate of the sample, such as `items_per_second` -> model FLOPs of one of them, or None.

    Raises:
        AccelError: FLOPs are given for several rates.
    """
    if sum(count is not None for count in flops.values()) > 1:
        raise AccelError(
            "metrics() is given flops_per_sample and flops_per_item, which are two counts of the same FLOPs\n"
            "give it one of them"
        )
    done = next((sample[name] * count for name, count in flops.items() if count and sample.get(name)), None)
    if done is None:
        return None
    peaks: Any = run.hooks["monitor.device_specs"](run.device).get("flops", {})
    peak = peaks.get(_dtype(run))
    # A plugin that drives several devices in a process has them all in its mesh.
    devices = max(run.world.size, math.prod(dim.size for dim in run.mesh.dims) if run.mesh else 1)
    return float(done / (peak * devices)) if peak else None


def _dtype(run: Run) -> str | None:
    """Return the dtype that the models compute in; None if there is no single one."""
    card = run.stack.precision.card
    if card.name != "fp32" and run.config.autocast.enabled:
        return next((DTYPES[word] for word in (card.name, *card.also) if word in DTYPES), None)
    models = [model for unit in run.prepared.trained for model in unit.models]
    dtypes = {parameter.dtype for model in models for parameter in model.parameters()}
    return str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None
