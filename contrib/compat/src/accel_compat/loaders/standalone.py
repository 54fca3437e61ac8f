"""Standalone dataloaders, which a program makes without `prepare`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar

from torch.utils.data import BatchSampler, DataLoader

from accel_compat.loaders.samplers import get_sampler
from accel_compat.state.gradient_state import GradientState
from accel_compat.state.operations import (
    broadcast_object_list,
    concatenate,
    find_batch_size,
    send_to_device,
    slice_tensors,
    synchronize_rng_states,
)
from accel_compat.state.states import PartialState
from accel_core import PreparedLoader

_END: Any = object()


class _Prepared(type):
    """Lets what a run prepared count as Accelerate's classes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, PreparedLoader):
            return super().__instancecheck__(instance)
        dispatches = instance._run.config.data.dispatch_batches or instance._plan.dispatches
        kind = "DataLoaderDispatcher" if dispatches else "DataLoaderShard"
        return cls.__name__ in (kind, "DataLoaderStateMixin", "DataLoaderAdapter")


class DataLoaderStateMixin(metaclass=_Prepared):
    """A dataloader's position in its epoch, which GradientState reads."""

    end_of_dataloader = False
    remainder = -1
    gradient_state: GradientState

    def reset(self) -> None:
        """Forget the last epoch."""
        self.end_of_dataloader, self.remainder = False, -1

    def begin(self) -> None:
        """Begin an epoch."""
        self.reset()
        with suppress(Exception):  # whatever a dataset or sampler without sizes raises: nobody knows then
            if not self._drop_last:  # type: ignore[attr-defined]
                self.remainder = self.total_dataset_length % self.total_batch_size  # type: ignore[attr-defined]
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """End the epoch: it is over, or was left."""
        self.gradient_state._remove_dataloader(self)


class DataLoaderAdapter(metaclass=_Prepared):
    """Wrapper of a DataLoader or StatefulDataLoader, and such a one for `isinstance`."""

    options: ClassVar[tuple[str, ...]] = ("use_stateful_dataloader",)
    base_dataloader: Any
    end_of_dataloader: bool

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        cls: Any = DataLoader
        if use_stateful_dataloader:
            from torchdata import stateful_dataloader  # type: ignore[import-untyped]

            cls = stateful_dataloader.StatefulDataLoader
        self.use_stateful_dataloader = use_stateful_dataloader
        self.base_dataloader = cls(dataset, batch_sampler=batch_sampler, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.base_dataloader)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __reduce__(self) -> Any:
        return _restored, (type(self), self.__dict__)

    def state_dict(self) -> dict[str, Any]:
        """State at the user's batch; the dataloader inside is one batch ahead."""
        noted = self.__dict__.get("_noted")
        state: dict[str, Any] = self.base_dataloader.state_dict() if noted is None else noted
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.base_dataloader.load_state_dict(state_dict)

    def _note(self) -> None:
        """Keep where the dataloader inside is now."""
        if hasattr(self.base_dataloader, "state_dict"):
            self._noted = {
                **self.base_dataloader.state_dict(),
                "_iterator_finished": self.end_of_dataloader,
            }

    def get_sampler(self) -> Any:
        """Return the sampler that gives samples their order."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Take another one."""
        outer = self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler
        outer.sampler = sampler
        if hasattr(outer, "batch_sampler"):
            outer.batch_sampler.sampler = sampler


def _restored(cls: type[DataLoaderAdapter], state: dict[str, Any]) -> DataLoaderAdapter:
    made = object.__new__(cls)
    made.__dict__.update(state)
    return made


class _Counting(DataLoaderAdapter, DataLoaderStateMixin):
    """A dataloader that counts its epochs, and tells samplers and dataset."""

    iteration: int
    skip_batches: int

    def _batches(self) -> Iterator[Any]:
        raise NotImplementedError  # a subclass reads

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            self.set_epoch(self.iteration)
            yield from islice(self._batches(), self.skip_batches, None)
            self.iteration += 1
        finally:  # on `break` too
            self.end()

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to samplers and dataset, once each."""
        self.iteration = epoch
        batches = self.batch_sampler
        inner = getattr(batches, "batch_sampler", None)
        samplers = (batches, getattr(batches, "sampler", None), getattr(inner, "sampler", None))
        told: tuple[Any, ...] = (*samplers, self.dataset)
        for each in {id(each): each for each in told}.values():
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return getattr(self.dataset, "total_length", None) or len(self.dataset)


class DataLoaderShard(_Counting):
    """A DataLoader that puts batches on a device and knows its last batch."""

    options = ("use_stateful_dataloader", "device", "rng_types", "synchronized_generator", "iteration")

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        rng_types: Any = None,
        synchronized_generator: Any = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.iteration = iteration
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.gradient_state = GradientState()

    def __iter__(self) -> Iterator[Any]:
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        yield from super().__iter__()

    def _batches(self) -> Iterator[Any]:
        batches = iter(self.base_dataloader)
        held = next(batches, _END)
        while held is not _END:
            if self.device is not None:
                held = send_to_device(held, self.device, non_blocking=self._non_blocking)
            self._note()
            following = next(batches, _END)
            if following is _END:
                self.end_of_dataloader = True
                self._note()
            yield held
            held = following

    @property
    def total_batch_size(self) -> int:
        """Samples that all processes take together."""
        batches: Any = self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler
        split = getattr(batches, "split_batches", False)
        return int(batches.batch_size) * (1 if split else getattr(batches, "num_processes", 1))


class DataLoaderDispatcher(_Counting):
    """A DataLoader that rank 0 reads for all ranks. Iterating it is collective."""

    options = ("use_stateful_dataloader", "split_batches", "slice_fn", "iteration")

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Any = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, **kwargs)
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self.iteration = iteration
        self.slice_fn = slice_tensors if slice_fn is None else slice_fn
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.state, self.gradient_state = PartialState(), GradientState()

    def _batches(self) -> Iterator[Any]:
        """Yield this process's part of each round; the last is filled up from the first."""
        ranks, reader = self.state.num_processes, iter(self.base_dataloader)
        held, first = self._read(reader), None
        while held is not _END:
            self._note()
            following = self._read(reader)
            samples = find_batch_size(held) or 0
            first = self._cut(held, 0, ranks) if first is None else first
            if following is _END:
                self.end_of_dataloader, self.remainder = True, samples
                self._note()
            if following is _END and samples % ranks and not self._drop_last:
                held = concatenate([held, first], dim=0)
                samples += ranks - samples % ranks
            size = samples // ranks
            yield self._cut(held, self.state.process_index * size, (self.state.process_index + 1) * size)
            held = following

    def _cut(self, batch: Any, start: int, end: int) -> Any:
        ranks = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
        return self.slice_fn(batch, slice(start, end), **ranks)

    def _read(self, reader: Iterator[Any]) -> Any:
        """Return the next round, on all ranks."""
        found: list[Any] = []
        if self.state.process_index == 0:
            found = list(islice(reader, 1 if self.split_batches else self.state.num_processes))
        read = [bool(found), concatenate(found, dim=0) if found else None]
        if self.state.num_processes > 1:
            read = broadcast_object_list(read)
        return send_to_device(read[1], self.state.device, self._non_blocking) if read[0] else _END

    def __len__(self) -> int:
        whole = len(self.base_dataloader)
        if self.split_batches:
            return whole
        share = whole / self.state.num_processes
        return math.floor(share) if self._drop_last else math.ceil(share)

    @property
    def total_batch_size(self) -> int:
        """Samples that all processes take together."""
        return int(self.batch_size or 1) * (1 if self.split_batches else self.state.num_processes)

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.dataset)


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A dataloader without its first batches, in each epoch."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self._drop_last = True  # nothing is to be known of the samples left over

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for number, batch in enumerate(self.base_dataloader):
                if number >= self.skip_batches:
                    self._note()
                    yield batch
        finally:  # on `break` too
            self.end()

    def __len__(self) -> int:
        return super().__len__() - self.skip_batches
