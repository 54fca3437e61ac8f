"""The cards, which accel-core reads before anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["REPORT", "WATCH"]

REPORT = Card(
    name="report",
    slot="command",
    summary="Show what runs did: a summary here, or a page with curves.",
    api_version="1.0",
    implementation="accel_report.commands:report",
)

WATCH = Card(
    name="watch",
    slot="command",
    summary="Show a run while it trains, from its record.",
    api_version="1.0",
    implementation="accel_report.commands:watch",
)
