"""The package's card, which accel-core reads first."""

from __future__ import annotations

from accel_core import Card

CARD = Card(
    name="compat",
    slot="command",
    summary="Run programs written for Accelerate.",
    api_version="1.0",
    implementation="accel_compat.launch.commands:compat",
    verify="accel_compat.activation:explain_inactive",
)
