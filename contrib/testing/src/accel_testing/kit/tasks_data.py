"""The loaders of level 3: readers, batches that arrive, resumed epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_core import Accelerator, DataLoaderConfiguration
from accel_testing.kit.tasks import make

__all__ = ["resumed", "stream"]

WIDTH = 4096
"""Of a sample: a batch of several is more than what travels along with a check."""


class Stream(IterableDataset[Any]):
    """Samples (number, a row full of that number), and how many were read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.length):
            self.read += 1
            yield torch.tensor(number), torch.full((WIDTH,), float(number))


def _loader(length: int, batch_size: int, data: str) -> DataLoader[Any]:
    if data == "iterable":
        return DataLoader(Stream(length), batch_size)
    rows = torch.arange(float(length)).reshape(-1, 1).expand(length, WIDTH)
    return DataLoader(TensorDataset(torch.arange(length), rows), batch_size)


def _accelerator(arguments: Mapping[str, Any], dispatch: bool | None) -> Accelerator:
    return make(arguments, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))


def _gathered(accelerator: Accelerator, batch: Any) -> list[tuple[float, float, float]]:
    """Return (number, row's least, row's greatest) of all readers' samples."""
    ids, rows = batch
    kept = accelerator.gather_for_metrics([ids, rows.amin(1), rows.amax(1)])
    return list(zip(*(each.tolist() for each in kept), strict=True))


def stream(
    length: int, batch_size: int, data: str, dispatch: bool | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Read one epoch: samples as metrics see them, and the number read here."""
    accelerator = _accelerator(arguments, dispatch)
    loader = accelerator.prepare(_loader(length, batch_size, data))
    seen = [sample for batch in loader for sample in _gathered(accelerator, batch)]
    accelerator.end_training()
    return {"seen": seen, "read": getattr(loader.dataset, "read", None)}


def resumed(data: str, dispatch: bool | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rest of an epoch after two rounds: as it went, and as it is resumed."""
    accelerator = _accelerator(arguments, dispatch)
    samples = 8 + 9 * accelerator.run.topology.readers  # two rounds and more, the last of them short
    loader, again = (accelerator.prepare(_loader(samples, 3, data)) for _ in range(2))
    rounds = iter(loader)
    for batch in islice(rounds, 2):
        _gathered(accelerator, batch)
    again.load_state_dict(loader.state_dict())
    expected = [sample for batch in rounds for sample in _gathered(accelerator, batch)]
    found = [sample for batch in again for sample in _gathered(accelerator, batch)]
    accelerator.end_training()
    return {"expected": expected, "found": found}
