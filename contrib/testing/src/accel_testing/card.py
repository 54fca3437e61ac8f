"""The cards of the commands: accel-core reads them before anything else."""

from __future__ import annotations

from accel_core import Card

__all__ = ["CHECK", "NEW"]

CHECK = Card(
    name="plugins-check",
    slot="command",
    summary="Run the conformance tests on a stack of plugins.",
    api_version="1.0",
    implementation="accel_testing.check:check",
)

NEW = Card(
    name="plugins-new",
    slot="command",
    summary="Write a new distribution with one plugin that passes the conformance tests.",
    api_version="1.0",
    implementation="accel_testing.new:new",
)
