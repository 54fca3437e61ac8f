"""The cards, which accel-core reads before anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["MONITOR", "REPLICAS", "REPORT", "WATCH"]

REPORT = Card(
    name="report",
    slot="command",
    summary="Show what runs did: a summary here, or a page with curves.",
    api_version="1.0",
    implementation="accel_monitor.commands:report",
)

WATCH = Card(
    name="watch",
    slot="command",
    summary="Show a run while it trains, from its record.",
    api_version="1.0",
    implementation="accel_monitor.commands:watch",
)


MONITOR = Card(
    name="monitor",
    slot="extension",
    summary="Records a run in its project folder, and names ranks that others wait for.",
    api_version="1.0",
    priority=100,
    hookspecs="accel_monitor.device_hooks",
    config="accel_monitor.config:MonitorConfig",
    implementation="accel_monitor.monitor:Monitor",
)


REPLICAS = Card(
    name="replicas",
    slot="extension",
    summary="Compares what several ranks hold alike, by checksums, and names what has drifted apart.",
    api_version="1.0",
    config="accel_monitor.config:ReplicasConfig",
    implementation="accel_monitor.replicas:Replicas",
)
