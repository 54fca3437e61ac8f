"""The strategies among the strangers."""

from __future__ import annotations

from typing import Any

import torch

from accel_core import Topology, hooks, implements


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
