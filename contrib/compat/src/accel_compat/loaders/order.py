"""Accelerate's random order, to compare a migrated program with its old numbers, digit for digit.

`ACCEL_COMPAT_ORDER=accelerate` asks for it. Several processes then shuffle as Accelerate does: `prepare`
draws a seed for each sampler, and gives the sampler a generator of its own. Without workers each batch is
read before the one before it is handed out, so that random numbers of the dataset and of the forward are
drawn in Accelerate's turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_core import PreparedLoader

if TYPE_CHECKING:
    from accel_core import Run


def is_accelerates() -> bool:
    """Return whether the program is to be compared with Accelerate."""
    return os.environ.get("ACCEL_COMPAT_ORDER") == "accelerate"


def draw_seeds(things: Iterable[Any], run: Run) -> None:
    """Give the samplers of loaders that are prepared now generators of their own."""
    data = run.config.data
    if run.topology.readers == 1 or data.dispatch_batches or data.use_seedable_sampler:
        return
    for loader in things if is_accelerates() else ():
        if not isinstance(loader, DataLoader) or isinstance(loader, PreparedLoader):
            continue
        batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        sampler: Any = getattr(batches, "sampler", None)
        lacks_generator = sampler is not None and getattr(sampler, "generator", sampler) is None
        if lacks_generator and not isinstance(loader.dataset, IterableDataset):
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
            sampler.generator = torch.Generator().manual_seed(seed)


def read_ahead(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield a batch once the next one is read. The epoch begins with the first."""
    held: list[Any] = []
    for batch in begin():
        held.append(batch)
        if len(held) > 1:
            yield held.pop(0)
    yield from held
