"""The cards, which accel-core reads before anything else of this package."""

from __future__ import annotations

from attrs import frozen

from accel_core import Card, KwargsHandler, option

__all__ = ["MONITOR", "REPLICAS", "REPORT", "WATCH", "MonitorConfig", "ReplicasConfig"]

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


@frozen(kw_only=True)
class MonitorConfig(KwargsHandler):
    """Options of the record of a run. Section `monitor`."""

    every: int = option(
        10, minimum=0, help="Steps for each of which the run's record has a sample; 0: no record."
    )


MONITOR = Card(
    name="monitor",
    slot="extension",
    summary="Records a run in its project folder, and names ranks that others wait for.",
    api_version="1.0",
    priority=100,
    hookspecs="accel_monitor.device_hooks",
    config="accel_monitor.card:MonitorConfig",
    implementation="accel_monitor.monitor:Monitor",
)


@frozen(kw_only=True)
class ReplicasConfig(KwargsHandler):
    """Options of the comparison of replicas. Section `replicas`."""

    every: int = option(100, minimum=1, help="Optimizer steps of a unit from one comparison to the next.")


REPLICAS = Card(
    name="replicas",
    slot="extension",
    summary="Compares what several ranks hold alike, by checksums, and names what has drifted apart.",
    api_version="1.0",
    config="accel_monitor.card:ReplicasConfig",
    implementation="accel_monitor.replicas:Replicas",
)
