"""The options of section `tensor-parallel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["TorchTensorParallelPlugin"]


@frozen(kw_only=True)
class TorchTensorParallelPlugin(KwargsHandler):
    """Splitting of single layers over ranks, under fsdp. Section `tensor-parallel`."""

    tp_size: int = option(1, help="Over how many ranks a layer is split; -1: over all that are left.")
    parallelize_plan: Mapping[str, Any] | None = option(
        None,
        help="Pattern of module names -> style, added to the model's own tp_plan; null: leave it whole.",
    )
    loss_parallel: bool = option(
        False, help="Leave the logits split over ranks; cross_entropy then works on the parts."
    )
