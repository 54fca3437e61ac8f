"""The strangers' implementations."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from accel_core import Topology, hooks, implements
from accel_core.testing.simulated.device import module
from accel_core.testing.simulated.plugin import SimulatedDevice


class Late(SimulatedDevice):
    """Nothing is reduced in backward; all of it at the window's end."""

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit, num_items):
        if self.run.world.size > 1:
            group = self.run.collectives("world")
            for parameter in unit.named_parameters().values():
                if parameter.grad is not None:
                    group.all_reduce(parameter.grad, "mean")


class Replicas:
    """Every process begins with rank 0's weights; who reduces gradients is the device's business."""

    below: Any

    def __init__(self, config, run):
        self.run = run

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        if self.run.world.size > 1:
            group = self.run.collectives("world")
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    group.broadcast(tensor)
        return model


class Pair(Replicas):
    """All processes are one reader: each sees every batch, and averages with itself."""

    @implements(hooks.data_topology)
    def data_topology(self, world):
        return Topology(reader=0, readers=1, loss_dim="mine", gather_dim="mine")

    @implements(hooks.collectives)
    def collectives(self, dim):
        return Mine() if dim == "mine" else self.below.collectives(dim)


class Mine:
    """A group of this process alone."""

    rank, size = 0, 1

    def all_reduce(self, tensor, operation="sum"):
        return tensor

    def all_gather(self, tensor):
        return tensor

    def broadcast(self, tensor, source=0):
        return tensor

    def all_gather_object(self, value):
        return [value]

    def broadcast_object(self, value, source=0):
        return value

    def barrier(self):
        return None


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
        if name.startswith("accel_core.testing.kit"):
            return "user"
        if not name.startswith(("torch", "accel_core.testing", "strangers", "contextlib")):
            return name.partition(".")[0]
        frame = frame.f_back
    return "nobody"


class Early(SimulatedDevice):
    """Needs its vendor's library."""

    def __init__(self, config, run):
        import strangers.vendor  # noqa: F401

        super().__init__(config, run)
