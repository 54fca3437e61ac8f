"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

import re
from importlib import metadata

from accel_core import Card

__all__ = ["FSDP", "TENSOR_PARALLEL", "probe"]


def probe() -> str | None:
    """Return None if this package was tested on the installed torch, else the reason.

    Over gloo, torch 2.8 adds gradients up where fully_shard asks for their mean (pytorch/pytorch#162338).
    """
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "torch is not installed; pip install 'torch>=2.11'"
    release = re.findall(r"\d+", torch.partition("+")[0])[:2]  # of 2.11+cpu and 2.12rc1 too
    if tuple(map(int, release)) >= (2, 11):
        return None
    return f"torch {torch}: tested from 2.11 on, wrong over gloo on 2.8; pip install 'torch>=2.11'"


FSDP = Card(
    name="fsdp",
    slot="strategy",
    summary="Each process holds a part of every weight, gradient and optimizer state.",
    api_version="1.0",
    priority=None,  # only when named
    distributed_type="FSDP",
    offers={
        *("no_sync", "dtensors", "several_optimizers"),
        *("freezing", "unfreezing", "replacing", "regrouping", "closures", "partial_clips"),
    },
    needs={"collectives.torch", "process_per_device"},
    dimensions={
        "dp_replicate": "Replicated data parallelism (HSDP): copies of the sharded model; unset: 1.",
        "dp_shard": "Fully sharded data parallelism (FSDP): ranks that share a copy; unset: all left.",
        "pp": "Pipeline parallelism: stages that the layers are spread over.",
        "ep": "Expert parallelism: ranks of dp_shard that share experts; not a factor of the world.",
    },
    config="accel_fsdp.config:FullyShardedDataParallelPlugin",
    implementation="accel_fsdp.strategy:strategy",
    probe=probe,
)

TENSOR_PARALLEL = Card(
    name="tensor-parallel",
    slot="extension",
    summary="Layers are split over processes that read the same data.",
    api_version="1.0",
    needs={"collectives.torch", "process_per_device", "dtensors"},
    dimensions={"tp": "Tensor parallelism: ranks that a layer is split over."},
    config="accel_fsdp.tensor.config:TorchTensorParallelPlugin",
    implementation="accel_fsdp.tensor.extension:TensorParallel",
)
