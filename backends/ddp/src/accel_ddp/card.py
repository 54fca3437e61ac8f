"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["DDP"]

DDP = Card(
    name="ddp",
    slot="strategy",
    summary="Each process trains a copy of the model; gradients are averaged during backward.",
    api_version="1.0",
    priority=100,
    distributed_type="MULTI_DEVICE",
    offers={
        *("no_sync", "local_sgd", "join", "several_optimizers", "whole_weights", "local_gradients"),
        *("freezing", "regrouping", "closures", "partial_clips"),
    },
    needs={"collectives.torch", "process_per_device"},
    dimensions={
        "dp_replicate": "Replicated data parallelism (DDP): copies of the model; unset: all ranks left."
    },
    config="accel_ddp.config:DistributedDataParallelKwargs",
    implementation="accel_ddp.strategy:make",
)
