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

    tp_size: int | None = option(
        None, python_only=True, dimension="tp", help="Another spelling of parallelism.tp."
    )
    tensor_parallel_degree: int | None = option(
        None, python_only=True, dimension="tp", help="Another spelling of parallelism.tp."
    )
    parallelize_plan: Mapping[str, Any] | None = option(
        None,
        help="Pattern of module names -> style, added to the model's own tp_plan; null: leave it whole.",
    )
    loss_parallel: bool = option(
        False, help="Leave the logits split over ranks; cross_entropy then works on the parts."
    )
