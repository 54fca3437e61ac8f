"""The random draws of each rank's layers, and its place in the mesh."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_core import set_seed
from accel_testing.kit.network import CLASSES, FEATURES, dataset, forward_loss
from accel_testing.kit.tasks import learn, make

__all__ = ["drawn"]


class Drawing(nn.Module):
    """A layer that draws a mask, and notes it."""

    def __init__(self, notes: list[float]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape[-1], device=x.device)
        self.notes += mask.tolist()
        return x * mask


def drawn(arguments: Mapping[str, Any]) -> tuple[tuple[int, ...], list[float]]:
    """Return this rank's place along dimensions that draw apart, and its draws.

    The first rank draws a number more than the others before the first step.
    """
    accelerator, notes = make(arguments, mixed_precision="no"), list[float]()
    set_seed(3, device_specific=True)
    layers: dict[str, nn.Module] = {"first": nn.Linear(FEATURES, FEATURES), "one": Drawing(notes)}
    layers |= {"middle": nn.Linear(FEATURES, FEATURES), "two": Drawing(notes)}
    model: nn.Module = nn.Sequential(OrderedDict(layers, last=nn.Linear(FEATURES, CLASSES)))
    batches: DataLoader[Any] = DataLoader(dataset(2 * accelerator.run.topology.readers * 2), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    if accelerator.is_main_process:
        torch.rand(1, device=accelerator.device)
    for _ in learn(accelerator, model, batches, forward_loss):
        optimizer.step()
        optimizer.zero_grad()
    mesh, reader = accelerator.run.units[-1].mesh, accelerator.run.topology.reader
    place = (
        (reader,)
        if mesh is None
        else tuple(mesh.index(each.name) for each in mesh.dims if not each.same_activations)
    )
    accelerator.end_training()
    return place, notes
