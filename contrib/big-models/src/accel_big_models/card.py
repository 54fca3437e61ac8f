"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["DISPATCHED", "ESTIMATE"]

DISPATCHED = Card(
    name="dispatched",
    slot="strategy",
    summary="A model larger than its device: weights come from host memory or disk, block by block.",
    api_version="1.0",
    priority=None,  # only when named
    offers={
        *("whole_weights", "streamed_weights", "local_gradients", "several_optimizers"),
        *("freezing", "unfreezing", "replacing", "regrouping", "closures", "partial_clips"),
    },
    config="accel_big_models.config:DispatchedPlugin",
    implementation="accel_big_models.strategy:Dispatched",
)

ESTIMATE = Card(
    name="estimate",
    slot="command",
    summary="Say how large a model is, what it needs to run and to train, and what fits where.",
    api_version="1.0",
    implementation="accel_big_models.commands:estimate",
)
