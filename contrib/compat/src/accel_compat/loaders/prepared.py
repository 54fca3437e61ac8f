"""Dataloaders that `prepare` returns: core's, with Accelerate's attributes."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from accel_compat import runs
from accel_compat.loaders.order import is_accelerates, read_ahead
from accel_compat.loaders.samplers import get_sampler
from accel_compat.state.gradient_state import GradientState
from accel_core import PreparedLoader

if TYPE_CHECKING:
    from accel_core import Run


class AcceleratedLoader(PreparedLoader):
    """A prepared dataloader.

    For `isinstance` it is a DataLoaderShard or a DataLoaderDispatcher.
    """

    _skips: int
    """Batches that each epoch leaves out."""

    def __reduce__(self) -> Any:
        return runs.pickle_by_reference(self)

    def __copy__(self) -> AcceleratedLoader:  # else by __reduce__, as itself
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if "_skips" in self.__dict__:  # in each epoch, as there
            self.__dict__["_skip"] = self._skips
        return super().__iter__()

    def _read(self, progress: Any, skipped: int) -> Iterator[Any] | None:
        read = partial(super()._read, progress, skipped)
        is_here = self._plan.sampler is not None and not (self._plan.dispatches or self.num_workers)
        return read_ahead(cast("Any", read)) if is_here and is_accelerates() else read()

    def __len__(self) -> int:
        return max(0, self._whole_length() - self._skips) if "_skips" in self.__dict__ else super().__len__()

    @property
    def gradient_state(self) -> GradientState:
        """Its run's."""
        return GradientState.of(cast("Run", self._run))

    @property
    def end_of_dataloader(self) -> bool:
        """True if the user holds the last batch of this epoch."""
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
        """Device of the batches."""
        return self._run.device if self._run.config.device_placement else None

    @property
    def base_dataloader(self) -> Any:
        """The user's loader with this process's share, which moves no batch."""
        return self._plan.inner

    @property
    def skip_batches(self) -> int:
        """Batches that each epoch leaves out."""
        return int(self.__dict__.get("_skips", 0))

    @property
    def synchronized_generator(self) -> Any:
        """The program's generator of the order of samples."""
        return None if self._run.world.size == 1 else getattr(self.get_sampler(), "generator", None)

    @property
    def rng_types(self) -> list[str]:
        """The random streams that an epoch's begin makes alike on all ranks."""
        drawn = ["generator"] if self.synchronized_generator is not None else []
        return [name for name in self._run.config.rng_types if name in (*self._plan.synchronized, *drawn)]

    @property
    def _drop_last(self) -> bool:
        return bool(self.drop_last)

    @property
    def _non_blocking(self) -> bool:
        return bool(self._run.config.data.non_blocking)

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if torchdata's StatefulDataLoader reads."""
        return _is_stateful(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the next iteration's number; samplers and dataset are told at once."""
        super().set_epoch(epoch)
        told: tuple[Any, ...] = (self.batch_sampler, self.sampler, self.dataset)
        for each in told:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def get_sampler(self) -> Any:
        """Return the sampler that gives samples their order."""
        return get_sampler(self)


def _is_stateful(loader: PreparedLoader) -> bool:
    return type(loader._plan.inner).__module__.startswith("torchdata.")


@cache
def _stateful() -> type[AcceleratedLoader]:
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

    return types.new_class("AcceleratedLoader", (AcceleratedLoader, StatefulDataLoader))


def wrap_loader(loader: PreparedLoader) -> PreparedLoader:
    """Return the loader itself, with these attributes."""
    if not isinstance(loader, AcceleratedLoader):  # the run knows this very object, so it is not copied
        loader.__class__ = _stateful() if _is_stateful(loader) else AcceleratedLoader
    return loader
