"""The devices among the unusual_plugins."""

from __future__ import annotations

import os
import sys

from accel_core import hooks, implements
from accel_testing.simulated.device import module
from accel_testing.simulated.plugin import SimulatedDevice


class Late(SimulatedDevice):
    """Nothing is reduced in backward; all of it at the window's end."""

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit):
        if self.run.world.size > 1:
            group = self.run.collectives("world")
            for parameter in unit.named_parameters().values():
                if parameter.requires_grad:
                    if parameter.grad is None:  # other ranks may have one
                        parameter.grad = parameter.new_zeros(parameter.shape)
                    group.all_reduce(parameter.grad, "mean")


class Lazy(SimulatedDevice):
    """Fails where core itself reads a value that it has not announced; users read as they like."""

    def __init__(self, config, run):
        super().__init__(config, run)
        self.told = False
        module().on_host_read = self.check

    @implements(hooks.mark_step)
    def mark_step(self, point):
        self.told = point in ("host_read", "state") and os.environ.get("BREAK_CORE") != "say_nothing"

    def check(self):
        if reader() == "accel_core" and not self.told:
            raise AssertionError("core reads from the device without mark_step('host_read')")


def reader() -> str:
    """The package whose code asked for the value: the nearest one that is neither torch nor the device."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("accel_testing.kit"):
            return "user"
        if not name.startswith(("torch", "accel_testing", "unusual_plugins", "contextlib")):
            return name.partition(".")[0]
        frame = frame.f_back
    return "nobody"


class Early(SimulatedDevice):
    """Needs its vendor's library."""

    def __init__(self, config, run):
        import unusual_plugins.vendor  # noqa: F401

        super().__init__(config, run)
