"""What `prepare` returns for dataloaders: core's own, with the attributes that Accelerate's have."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Any

from accel_compat import runs
from accel_core import PreparedLoader

from ._samplers import get_sampler
from .state import GradientState

__all__ = ["AcceleratedLoader", "dressed"]


class AcceleratedLoader(PreparedLoader):
    """A prepared dataloader; `isinstance` counts it as DataLoaderShard or DataLoaderDispatcher."""

    _skips: int
    """Batches that each epoch leaves out."""

    def __reduce__(self) -> Any:
        return runs.reduced(self)

    def __copy__(self) -> AcceleratedLoader:  # else by __reduce__, as itself
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if "_skips" in self.__dict__:  # in each epoch, as there
            self.__dict__["_skip"] = self._skips
        return super().__iter__()

    @property
    def gradient_state(self) -> GradientState:
        """Its run's."""
        return GradientState.of(self._run)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the user holds the last batch of this epoch."""
        return self.last

    @property
    def iteration(self) -> int:
        """The number of the current epoch, or the next. Settable."""
        return self.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def device(self) -> Any:
        """Where batches are put."""
        return None if self._move is None else self._run.device

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's StatefulDataLoader reads."""
        return self._kind == "stateful"

    def set_epoch(self, epoch: int) -> None:
        """The number of the next iteration, which samplers and dataset are told at once."""
        super().set_epoch(epoch)
        told: tuple[Any, ...] = (self.batch_sampler, self.sampler, self.dataset)
        for each in told:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def get_sampler(self) -> Any:
        """The sampler that gives samples their order."""
        return get_sampler(self)


@cache
def _stateful() -> type[AcceleratedLoader]:
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

    return types.new_class("AcceleratedLoader", (AcceleratedLoader, StatefulDataLoader))


def dressed(loader: PreparedLoader) -> PreparedLoader:
    """The loader itself, with these attributes."""
    if not isinstance(loader, AcceleratedLoader):  # the run knows this very object, so it is not copied
        loader.__class__ = _stateful() if loader._kind == "stateful" else AcceleratedLoader
    return loader
