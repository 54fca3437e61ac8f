"""Loaders and datasets that know their own position: torchdata's, and others with the same two methods."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from accel_core.data.sharding import Sharding, batched, split_head
from accel_core.errors import ConfigError
from accel_core.plugins.catalog import install_hint


def is_stateful(thing: object) -> bool:
    """Return whether the object has `state_dict` and `load_state_dict`."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def stateful(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return torchdata's loader with the options of this loader.

    Raises:
        ConfigError: the loader's class is not torch's DataLoader, or torchdata is not installed.
    """
    if type(loader) is not DataLoader:
        raise ConfigError(
            f"data.use_stateful_dataloader=True: {type(loader).__qualname__} is a DataLoader of your own\n"
            "let it inherit from torchdata.stateful_dataloader.StatefulDataLoader, or leave this unset"
        )
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            "data.use_stateful_dataloader=True: torchdata is not installed (map-style data resumes exactly"
            f" without it)\n{install_hint('.[stateful]')}"
        ) from error
    made: DataLoader[Any] = StatefulDataLoader(())
    made.__dict__.update(loader.__dict__)
    return made


class StatefulShares(Iterator["Shares"]):
    """Shares of an iterable dataset that knows its position, or whose iterator does.

    With several readers, a share is returned after the next round was read; its state is from before that.
    """

    def __init__(self, sharded: ShardedIterable, source: Iterator[Any]) -> None:
        self._sharded, self._source = sharded, source
        self._shares: Iterator[Shares] | None = None
        self._states: deque[Any] = deque()
        self._state: Any = None

    def __next__(self) -> Shares:
        if self._shares is None:
            self._shares = self._sharded.share(self._samples(), ())
        share = next(self._shares)
        self._state = self._states.popleft() if self._sharded.sharding.readers > 1 else None
        return share

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the dataset and its iterator, after the last share."""
        state: dict[str, Any] = self._state or self._now()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        dataset, iterator = state["dataset"], state["iterator"]
        if dataset is not None:
            self._sharded.dataset.load_state_dict(dataset)  # type: ignore[attr-defined]
        self._source = iter(self._sharded.dataset)
        if iterator is not None:
            self._source.load_state_dict(iterator)  # type: ignore[attr-defined]
        self._shares, self._state = None, None
        self._states.clear()

    def _samples(self) -> Iterator[Any]:
        sharding = self._sharded.sharding
        if sharding.readers == 1:
            yield from self._source
            return
        per_round = sharding.batches * self._sharded.batch_size
        for number, sample in enumerate(self._source, start=1):
            yield sample
            if number % per_round == 0:
                self._states.append(self._now())
        self._states.append(self._now())

    def _now(self) -> dict[str, Any]:
        dataset: Any = self._sharded.dataset
        source = self._source
        return {
            "dataset": None if dataset is source else state_of(dataset),
            "iterator": state_of(source),
        }


def state_of(thing: Any) -> Any:
    """Return a copy of the object's state, None if it is not stateful."""
    return copy.deepcopy(thing.state_dict()) if is_stateful(thing) else None


Shares: TypeAlias = tuple[Sequence[Any], int]
"""(batches of one round, number of its real samples); see `Sharding.shares`."""


class ShardedIterable(IterableDataset[Any]):
    """A reader's share of an iterable dataset: the reader reads all of it, and keeps every readers-th batch.

    Yields ([samples of a batch], real samples in its round), to be collated by `ShareCollate`. In a process
    that reads for all, the first item holds the batches of all readers of the round.

    Attributes:
        skip: number of batches, of all readers, that the next iteration leaves out.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        sharding: Sharding,
        batch_size: int,
        *,
        everyone: bool,
        stateful: bool,
    ) -> None:
        self.dataset, self.sharding, self.batch_size = dataset, sharding, batch_size
        self.everyone, self.stateful, self.skip = everyone, stateful, 0

    def __iter__(self) -> Iterator[Shares]:
        skip, self.skip = self.skip, 0
        source: Iterator[Any] = iter(self.dataset)
        if self.stateful and (is_stateful(self.dataset) or is_stateful(source)):
            return StatefulShares(self, source)
        head, samples = split_head(source, self.sharding.wanted, skip * self.batch_size)
        return self.share(samples, head)

    def share(self, samples: Iterable[Any], head: Sequence[Any]) -> Iterator[Shares]:
        """Return the shares of these samples."""
        batches = batched(samples, self.batch_size, drop_last=self.sharding.drop_last)
        return self.sharding.shares(batches, head, everyone=self.everyone)
