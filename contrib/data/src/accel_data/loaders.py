"""Loaders that stand for a library's own loader, with the attributes of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

__all__ = ["Batches", "StandIn", "StatefulStandIn"]


class Batches(IterableDataset[Any]):
    """A library's loader as a dataset whose samples are its batches."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


def unchanged(batch: Any) -> Any:
    """Collate nothing."""
    return batch


def of_batches(source: Any) -> DataLoader[Any]:
    """Return a DataLoader of the batches of a loader that is not torch's."""
    return DataLoader(Batches(source), batch_size=None, collate_fn=unchanged)


class StandIn(DataLoader[Any]):
    """Reads a library's loader by the loader's own iterator.

    Args:
        source: the library's loader.
        tell_epoch: called with the number of each epoch before it begins.
    """

    def __init__(self, source: Any, tell_epoch: Callable[[int], object] | None = None) -> None:
        like = source if isinstance(source, DataLoader) else of_batches(source)
        self.__dict__.update(like.__dict__, source=source, tell_epoch=tell_epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int) -> None:
        """Tell the library the number of the next epoch."""
        if self.tell_epoch is not None:
            self.tell_epoch(epoch)


class StatefulStandIn(StandIn):
    """Reads a library's loader that knows its position."""

    def state_dict(self) -> Any:
        """Return the library's state."""
        return self.source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Give the library its state back."""
        self.source.load_state_dict(state)
