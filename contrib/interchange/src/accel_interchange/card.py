"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["ACCELERATE", "DCP", "DEEPSPEED"]

ACCELERATE = Card(
    name="checkpoint-accelerate",
    slot="command",
    summary="Import and export what Accelerate 1.x's save_state writes.",
    api_version="1.0",
    implementation="accel_interchange.commands:accelerate",
)

DCP = Card(
    name="checkpoint-dcp",
    slot="command",
    summary="Import and export what torch.distributed.checkpoint writes.",
    api_version="1.0",
    implementation="accel_interchange.commands:dcp",
)

DEEPSPEED = Card(
    name="checkpoint-deepspeed",
    slot="command",
    summary="Import what DeepSpeed's save_checkpoint writes, and universal checkpoints.",
    api_version="1.0",
    implementation="accel_interchange.commands:deepspeed",
)
