"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["TENSORBOARD"]

TENSORBOARD = Card(
    name="tensorboard",
    slot="tracker",
    summary="Event files that TensorBoard shows.",
    api_version="1.0",
    implementation="accel_tensorboard.tracker:TensorBoardTracker",
)
