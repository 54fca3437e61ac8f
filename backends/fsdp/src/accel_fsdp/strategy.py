"""Strategy `fsdp`: the version of torch's FSDP that the config asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_fsdp.config import FullyShardedDataParallelPlugin
from accel_fsdp.sharding.base import FullyShardedDataParallel

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["strategy"]


def strategy(config: FullyShardedDataParallelPlugin | None, run: Run) -> FullyShardedDataParallel:
    """Return the implementation of the version that the config asks for."""
    config = config or FullyShardedDataParallelPlugin()
    if config.fsdp_version == 1:
        from accel_fsdp.fsdp1.strategy import Flat

        return Flat(config, run)
    if run.config.parallelism.get("pp", 1) != 1 and run.world.size > 1:
        from accel_fsdp.pipeline.strategy import Pipelined

        return Pipelined(config, run)
    if any(extension.name == "tensor-parallel" for extension in run.stack.extensions):
        from accel_fsdp.tensor.split import Split

        return Split(config, run)
    from accel_fsdp.sharding.fsdp2 import Sharded

    return Sharded(config, run)
