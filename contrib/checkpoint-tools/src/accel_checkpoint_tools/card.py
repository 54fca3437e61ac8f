"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["CHECKPOINT"]

CHECKPOINT = Card(
    name="checkpoint",
    slot="command",
    summary="List, show, verify, export, compare and import checkpoints.",
    api_version="1.0",
    implementation="accel_checkpoint_tools.commands:checkpoint",
)
