"""Copies of blocks to where they are computed, ahead of the computation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

import torch
from attrs import define, field, frozen
from torch import Tensor

from accel_big_models.composing import Composed, composed, is_in_memory, parts_of
from accel_big_models.sources import Source

__all__ = ["Cargo", "Mover", "Slot", "pinned"]

ALIGNED: Final = 256
"""Bytes that the start of each weight in a buffer is a multiple of."""
STAGED: Final = 2
"""Buffers between disk and device: one is copied, the other is read into."""


class Cargo:
    """Weights that move together: sources of plain parts, and places in a buffer."""

    def __init__(self, name: str, sources: Sequence[Source]) -> None:
        self.name = name
        self.weights = tuple(sources)
        self.sources = tuple(part for source in sources for part in parts_of(source))
        self.starts: list[int] = []
        self.size = 0
        for source in self.sources:
            self.starts.append(self.size)
            used = torch.Size(source.shape).numel() * source.dtype.itemsize
            self.size += -(-used // ALIGNED) * ALIGNED
        self.in_memory = all(map(is_in_memory, self.weights))
        """True if no disk is read, and no dtype changes."""

    @cached_property
    def is_pinned(self) -> bool:
        """True if copies read the host's memory only once the device gets to them."""
        return any((values := source.tensor()) is not None and values.is_pinned() for source in self.sources)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the weights' plain parts as views of a buffer of bytes, on any device."""
        views = []
        for source, start in zip(self.sources, self.starts, strict=True):
            size = torch.Size(source.shape).numel() * source.dtype.itemsize
            views.append(buffer[start : start + size].view(source.dtype).view(source.shape))
        return views

    def unpacked(self, buffer: Tensor) -> list[Tensor]:
        """Return each weight, over its views of a buffer."""
        views = iter(self.views(buffer))
        return [composed(it.like, views) if isinstance(it, Composed) else next(views) for it in self.weights]

    def read(self, buffer: Tensor) -> None:
        """Fill a buffer in host memory."""
        for source, view in zip(self.sources, self.views(buffer), strict=True):
            source.read(view)


@define(eq=False)
class Slot:
    """A buffer on the device that computes.

    cargo: whose weights are in it, or on their way. read_by: stream -> an event after what reads it there; it
    may be overwritten after all of these. used: by a thread. turn: grows with each cargo of any slot. read:
    the last transfer by the thread that reads, which may still be to come.
    """

    buffer: Tensor
    cargo: Cargo | None = None
    read_by: dict[Any, Any] = field(factory=dict)
    used: bool = False
    turn: int = 0
    read: Future[_Arrived] | None = None


@define(eq=False)
class _Staging:
    """A buffer in pinned memory. copied: an event after which it is free."""

    buffer: Tensor
    cargo: Cargo | None = None
    copied: Any = None


@frozen
class _Arrived:
    """The end of a transfer. event: of the device; None if the host waited."""

    event: Any


class Mover:
    """Brings cargo to one device: on a stream of its own, files by a thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.stream: Any = None if self.module is None else self.module.Stream(device=device)
        self.staging: list[_Staging] = []
        self._reader: ThreadPoolExecutor | None = None
        self._unsettled: Any = None
        """An event after the last copy of pinned weights, which may read them still."""

    def slot(self, size: int) -> Slot:
        """Allocate a buffer on the device."""
        slot = Slot(torch.empty(size, dtype=torch.uint8, device=self.device))
        if self.module is not None:
            _record(slot.buffer, self.stream)  # a copy may be under way when the model is gone
        self.note_read(slot)  # the memory may be that of a tensor which kernels still read
        return slot

    def note_read(self, slot: Slot) -> None:
        """Note that what is queued for the device now may read a slot."""
        if self.module is not None:
            stream = self.module.current_stream(self.device)
            slot.read_by[stream] = stream.record_event()
            _record(slot.buffer, stream)

    def settle(self) -> None:
        """Wait until no copy reads weights of the host: others may write them."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            unsettled.synchronize()

    def start(self, cargo: Cargo, slot: Slot) -> Future[_Arrived] | _Arrived:
        """Begin to bring cargo into a slot, once what reads the slot has done so."""
        slot.cargo = cargo
        free = slot.read is None or slot.read.done()
        if self.module is not None and cargo.in_memory and free:
            arrived = self._copy(slot, [each.tensor() for each in cargo.sources], cargo.views(slot.buffer))
            self._unsettled = arrived.event if cargo.is_pinned else self._unsettled
            return arrived
        # Behind what is still to be read into the slot, in vain, which would overwrite a copy.
        slot.read = self.reader.submit(self._fetch, cargo, slot)
        return slot.read

    def wait(self, transfer: Future[_Arrived] | _Arrived) -> None:
        """Have what is computed from now on wait for a transfer; raise its error."""
        arrived = transfer.result() if isinstance(transfer, Future) else transfer
        if arrived.event is not None:
            self.module.current_stream(self.device).wait_event(arrived.event)

    def stage(self, cargo: Cargo) -> None:
        """Begin to read cargo from disk, to be copied later."""
        if self.module is not None and not cargo.in_memory:
            self.reader.submit(self._stage, cargo)

    @property
    def reader(self) -> ThreadPoolExecutor:
        """The thread that reads; it begins with the first use."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "accel-big-models")
            weakref.finalize(self, self._reader.shutdown, wait=False)
        return self._reader

    def close(self) -> None:
        """End the thread, after what it reads now, and wait for copies."""
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)
            self._reader = None
        self.staging.clear()
        self.settle()

    # -- in the thread that reads ----------------------------------------------------------------

    def _fetch(self, cargo: Cargo, slot: Slot) -> _Arrived:
        if self.module is None:
            cargo.read(slot.buffer)
            return _Arrived(None)
        staging = self._stage(cargo)
        arrived = self._copy(slot, [staging.buffer[: cargo.size]], [slot.buffer[: cargo.size]])
        staging.copied, staging.cargo = arrived.event, None
        return arrived

    def _stage(self, cargo: Cargo) -> _Staging:
        """Return a buffer with the cargo; it may be there already."""
        staging = next((each for each in self.staging if each.cargo is cargo), None)
        if staging is None:
            staging = self._unused(cargo.size)
            if staging.copied is not None:
                staging.copied.synchronize()
            cargo.read(staging.buffer)
            staging.cargo = cargo
        return staging

    def _unused(self, size: int) -> _Staging:
        """Return a buffer of this size: a free one, else one that was read in vain."""
        fitting = [each for each in self.staging if each.buffer.numel() >= size]
        if len(self.staging) >= STAGED and fitting:
            chosen = next((each for each in fitting if each.cargo is None), fitting[0])
            self.staging.remove(chosen)
        else:
            if len(self.staging) >= STAGED:
                self.staging.pop(0)
            chosen = _Staging(pinned(torch.empty(size, dtype=torch.uint8), self.device))
        chosen.cargo = None
        self.staging.append(chosen)
        return chosen

    def _copy(self, slot: Slot, sources: Sequence[Tensor | None], targets: Sequence[Tensor]) -> _Arrived:
        """Queue copies to the device on the mover's own stream."""
        with torch.inference_mode(False), torch.no_grad(), self.module.stream(self.stream):
            for event in slot.read_by.values():
                self.stream.wait_event(event)
            slot.read_by.clear()
            for target, source in zip(targets, sources, strict=True):
                assert source is not None
                target.copy_(source, non_blocking=True)
            return _Arrived(self.stream.record_event())


def _record(buffer: Tensor, stream: Any) -> None:
    """Note for the time when a buffer is dropped that this stream uses it."""
    with suppress(RuntimeError):  # devices of third parties may have no such allocator
        buffer.record_stream(stream)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor in pinned memory, where the device's copies gain by it."""
    if device.type == "cpu" or tensor.is_pinned() or not tensor.numel():
        return tensor
    try:
        return tensor.pin_memory()
    except (RuntimeError, NotImplementedError):  # devices of third parties may have no pinned memory
        return tensor
