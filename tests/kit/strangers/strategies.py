"""The strategies among the strangers."""

from __future__ import annotations

from typing import Any

import torch

from accel_core import MeshDim, hooks, implements


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

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config, world):
        return [MeshDim("twin", -1, 150, "model")]


class Grid(Replicas):
    """Neighbours are one reader. Gradients are averaged over readers when the window ends."""

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config, world):
        return [MeshDim("neighbour", min(2, world.size), 250, "model"), MeshDim("dp_replicate", -1)]

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit, num_items):
        group = self.run.collectives(self.run.topology.loss_dim)
        for parameter in unit.named_parameters().values():
            if parameter.grad is not None:
                group.all_reduce(parameter.grad, "mean")
        self.below.reduce_gradients(unit, num_items)
