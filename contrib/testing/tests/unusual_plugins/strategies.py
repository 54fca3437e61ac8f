"""The strategies among the unusual_plugins."""

from __future__ import annotations

from typing import Any

import torch

from accel_core import AccelError, MeshDim, StepOutput, hooks, implements
from unusual_plugins.words import Words


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
        return [MeshDim("twin", -1, 150, "model", same_activations=True)]


class Grid(Replicas):
    """Neighbours are one reader. Gradients are averaged over readers when the window ends."""

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config, world):
        return [
            MeshDim("neighbour", min(2, world.size), 250, "model", same_activations=True),
            MeshDim("dp_replicate", -1),
        ]

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit):
        group = self.run.collectives(self.run.topology.loss_dim)
        for parameter in unit.named_parameters().values():
            if parameter.requires_grad:
                if parameter.grad is None:  # other ranks may have one
                    parameter.grad = torch.zeros_like(parameter)
                group.all_reduce(parameter.grad, "mean")


class Scheduled(Pair):
    """All forwards of a window, then its backward; models run in nothing else. The last rank has the loss."""

    scheduling = False

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        model.register_forward_pre_hook(self.refuse_others)
        return super().wrap_model(unit, model)

    def refuse_others(self, module, args):
        if not self.scheduling:
            raise AccelError("forward and backward are those of forward_backward")

    @implements(hooks.backward)
    def backward(self, unit, loss, boundary, options):
        raise AccelError("forward and backward are those of forward_backward")

    @implements(hooks.forward_backward)
    def forward_backward(self, unit, batches, forward_loss, microbatches, forward_only):
        self.scheduling = True
        try:
            with unit.whole_window(batches, microbatches) as taken:
                found = [forward_loss(unit.wrapped[0], batch) for batch in taken]
                losses = torch.stack([loss for loss, _ in found]).sum() / unit.window.divisor
                if not forward_only:
                    self.below.backward(unit, losses, True, {})
        finally:
            self.scheduling = False
        last = self.run.world.rank == self.run.world.size - 1
        loss = losses.detach() if last else losses.new_tensor(float("nan"))
        return StepOutput(loss=loss, valid=last, outputs=tuple(output for _, output in found))


class Narrow(Scheduled):
    """It has its own code for each kind of network, of which there is one, and stages to keep busy."""

    @implements(hooks.refuse_unit)
    def refuse_unit(self, unit, models, optimizers):
        return [f"{type(each).__name__} is none of Words" for each in models if not isinstance(each, Words)]

    @implements(hooks.forward_backward)
    def forward_backward(self, unit, batches, forward_loss, microbatches, forward_only):
        if (microbatches or unit.window.size) < 2:
            raise AccelError("one micro-batch would leave half of the stages idle")
        return super().forward_backward(unit, batches, forward_loss, microbatches, forward_only)
