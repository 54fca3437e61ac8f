"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["CP"]

CP = Card(
    name="cp",
    slot="extension",
    summary="Ranks share each sequence: every rank has a part of it, attention sees the whole.",
    api_version="1.0",
    needs={"collectives.torch", "process_per_device"},
    dimensions={"cp": "Context parallelism: ranks that share each sequence, for any attention."},
    config="accel_context_parallel.config:ContextParallelPlugin",
    implementation="accel_context_parallel.extension:ContextParallel",
)
