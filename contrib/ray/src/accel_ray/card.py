"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from importlib.util import find_spec

from accel_core import Card

__all__ = ["RAY"]


def _probe() -> str | None:
    """Ray's library is installed."""
    return None if find_spec("ray") else "the library ray is not installed; pip install 'ray[default]'"


RAY = Card(
    name="ray",
    slot="launcher",
    summary="Nodes of a Ray cluster, and jobs handed to Ray's job server.",
    api_version="1.0",
    priority=120,  # a cluster of Ray may run inside of Slurm's jobs
    offers={"worker_output"},
    probe=_probe,
    config="accel_ray.config:RayConfig",
    implementation="accel_ray.launcher:RayLauncher",
)
