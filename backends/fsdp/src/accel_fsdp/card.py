"""What accel-core reads of this package before anything else of it is imported."""

from __future__ import annotations

from accel_core import Card

__all__ = ["FSDP"]

FSDP = Card(
    name="fsdp",
    slot="strategy",
    summary="Each process holds a part of every weight, gradient and optimizer state.",
    api_version="1.0",
    priority=None,  # only when named
    distributed_type="FSDP",
    offers={"no_sync"},
    needs={"collectives.torch", "process_per_device"},
    config="accel_fsdp.config:FullyShardedDataParallelPlugin",
    implementation="accel_fsdp.strategy:strategy",
)
