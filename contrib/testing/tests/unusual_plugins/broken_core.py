"""Core with one of its promises broken, to show that an unusual plugin would notice."""

from __future__ import annotations


def clip_before_reducing() -> None:
    from accel_core.training import step

    def clip_norm(unit, parameters, max_norm, norm_type):
        return (
            unit.steps.clip_gradients(unit, parameters, max_norm, norm_type) if unit.window.boundary else None
        )

    step.clip_norm = clip_norm


def share_out_by_rank() -> None:
    from accel_core.contract.world import Topology
    from accel_core.runtime.run import Run

    def by_rank(self):
        return Topology(reader=self.world.rank, readers=self.world.size)

    Run.topology = property(by_rank, lambda self, value: None)


def import_before_setting() -> None:
    from accel_core.runtime import run

    run.apply_launch_environment = lambda of: []


def say_nothing() -> None:
    """The device itself turns deaf (unusual_plugins.devices.Lazy)."""
