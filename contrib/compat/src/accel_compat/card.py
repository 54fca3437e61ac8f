"""What accel-core reads of this package before anything else of it is imported."""

from __future__ import annotations

from accel_core import Card

__all__ = ["CARD"]

CARD = Card(
    name="compat",
    slot="command",
    summary="Run programs written for Accelerate.",
    api_version="1.0",
    implementation="accel_compat.commands:compat",
)
