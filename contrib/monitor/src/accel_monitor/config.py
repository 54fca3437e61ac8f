"""Options of the plugins, apart from the cards: listings import cards only."""

from __future__ import annotations

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["MonitorConfig", "ReplicasConfig"]


@frozen(kw_only=True)
class MonitorConfig(KwargsHandler):
    """Options of the record of a run. Section `monitor`."""

    every: int = option(10, minimum=0, help="Record one sample every N steps; 0: no record.")


@frozen(kw_only=True)
class ReplicasConfig(KwargsHandler):
    """Options of the comparison of replicas. Section `replicas`."""

    every: int = option(100, minimum=1, help="Compare every N optimizer steps of a unit.")
