"""A run that holds large tensors beside its model's, as functions for processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import stored_job as job
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_core import Accelerator, DataLoaderConfiguration

SIZE = 1_100_000
"""Numbers in each large tensor, of 4.4 MB."""
WIDTH = 8192
"""Of a model whose weight is 16 MB."""


class Average:
    """A registered object, whose key is a mark of checkpoints themselves."""

    def __init__(self) -> None:
        self.values = torch.zeros(SIZE)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"$stored": self.values}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values = state["$stored"]


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(64) for _ in range(64)])


class Reader(DataLoader[Any]):
    """A loader with state of its own, different on each rank."""

    values = torch.zeros(SIZE)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        type(self).values = state["values"]


class WithExtra(nn.Linear):
    """A model that adds a tensor to its state."""

    extra = torch.zeros(1)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


class Remembering(torch.optim.SGD):
    """An optimizer that keeps large tensors in a list, as LBFGS does."""


def made(width: int = 64) -> tuple[Accelerator, Any, Any, Any, Average]:
    torch.manual_seed(0)
    config = DataLoaderConfiguration(dispatch_batches=False)  # each rank reads, and has a state
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = WithExtra(width, 512)
    optimizer = Remembering(model.parameters(), lr=0.1)
    loader = Reader(Rows(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    average = Average()
    accelerator.register_for_checkpointing(average)
    return accelerator, model, optimizer, loader, average


def saved(url: str, width: int = 64) -> None:
    accelerator, model, optimizer, loader, average = made(width)
    Reader.values = torch.full((SIZE,), 10.0 + accelerator.process_index)
    batches = iter(loader)
    next(batches)
    job.step(accelerator, model, optimizer)
    inner = accelerator.unwrap_model(model)
    inner.extra = torch.full((SIZE,), 3.0)
    average.values.fill_(5.0)
    optimizer.state[inner.bias]["memory"] = [torch.full((SIZE,), 7.0)]
    accelerator.save_state(url)
    accelerator.end_training()


def loaded(url: str, width: int = 64) -> list[float]:
    """Return the numbers that the large tensors are filled with."""
    accelerator, model, optimizer, loader, average = made(width)
    accelerator.load_state(url)
    next(iter(loader))
    inner = accelerator.unwrap_model(model)
    found = [inner.extra, average.values, Reader.values, optimizer.state[inner.bias]["memory"][0]]
    assert all(len(each) == SIZE for each in found)
    values = [float(each.unique()) for each in found]
    accelerator.end_training()
    return values
