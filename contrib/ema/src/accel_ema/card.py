"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["EMA"]

EMA = Card(
    name="ema",
    slot="extension",
    summary="Keeps a moving average of the weights, sharded as they are, to evaluate and export.",
    api_version="1.0",
    config="accel_ema.config:EMAConfig",
    implementation="accel_ema.extension:MovingAverages",
)
