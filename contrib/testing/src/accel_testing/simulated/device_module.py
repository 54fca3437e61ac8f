"""`torch.NAME` of the simulated device: memory, streams, and waits of the host."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from accel_core import AccelError

__all__ = ["TOTAL_MEMORY", "DeviceModule", "install", "module"]

TOTAL_MEMORY: Final = 1 << 36
"""Bytes that each device says it has."""


class _Memory:
    """Bytes of the storages that live on one device."""

    def __init__(self) -> None:
        self.total = TOTAL_MEMORY
        self.allocated = 0
        self.peak = 0
        self._held: set[int] = set()

    def hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return
        if self.allocated + size > self.total:
            raise torch.OutOfMemoryError(
                f"tried to allocate {size} bytes: {self.allocated} of {self.total} are in use"
            )
        self._held.add(key)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.allocated -= size


class _Event:
    """A point in a stream. It has always passed: work is done when it is queued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept torch's arguments: with timing or without."""

    def record(self, stream: Any = None) -> _Event:
        return self

    def wait(self, stream: Any = None) -> None:
        """Nothing is ever pending."""

    def synchronize(self) -> None:
        """Do nothing but note that a host which asks would wait."""
        module().wait("Event.synchronize")

    def query(self) -> bool:
        return True


class _Stream:
    """A queue of work, each piece of which is done when it is put there."""

    stream_id = 0
    device_type = 20
    """`DeviceType::PrivateUse1` of torch's c10/core/DeviceType.h."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        """Accept torch's arguments."""
        self.device_index = 0 if device is None else module().index_of(device)

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def wait_event(self, event: _Event) -> None:
        """Nothing is ever pending."""

    def wait_stream(self, stream: _Stream) -> None:
        """Do nothing, for the same reason."""

    def synchronize(self) -> None:
        """Do nothing but note that a host which asks would wait."""
        module().wait("Stream.synchronize")


class DeviceModule:
    """`torch.NAME`: what torch and device plugins ask of a device's module.

    A process sees one device, as where the launcher masks the others, or as many as `simulate` is told.
    Torch's own device guard knows index 0 only: torch.accelerator counts one, and a backward pass runs
    on index 0 alone.
    """

    Stream, Event = _Stream, _Event

    def __init__(self, name: str) -> None:
        self.name = name
        self.memories: list[_Memory] = []
        self.host_reads = 0
        self.on_host_read: Callable[[], None] | None = None
        """Called before the host gets to see a value of the device."""
        self.waits = 0
        """The number of times that the host would have waited for the device."""
        self._waiting: str | int = "default"
        self._stream = _Stream()
        self._current = 0

    def device(self) -> torch.device:
        """Return the current device."""
        return torch.device(self.name, self._current)

    @property
    def memory(self) -> _Memory:
        """The memory of the current device."""
        return self.memories[self._current]

    def index_of(self, device: Any = None) -> int:
        """Return the index of a device as torch names it, or the current one's.

        Raises:
            RuntimeError: there is no such device.
        """
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        if index is None:
            return self._current
        if not 0 <= index < len(self.memories):
            raise RuntimeError(
                f"invalid device ordinal {index}: this process sees {len(self.memories)} {self.name}"
            )
        return index

    def read(self) -> None:
        """Count a value that goes to the host."""
        self.host_reads += 1
        if self.on_host_read is not None:
            self.on_host_read()

    def wait(self, why: str) -> None:
        """Count a wait of the host.

        Raises:
            RuntimeError: the mode that was set says so.
        """
        self.waits += 1
        if self._waiting in ("error", 2):
            raise RuntimeError(f"{why}: the host waits for the {self.name} device")

    def set_sync_debug_mode(self, debug_mode: str | int) -> None:
        """Set the mode, as torch.cuda does: "error" makes each host wait an error."""
        if debug_mode not in ("default", 0):
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        self._waiting = debug_mode

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.memories)

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        self._current = self.index_of(device)

    def synchronize(self, device: Any = None) -> None:
        """Nothing is ever pending; a host that asks would wait."""
        self.wait("synchronize")

    def current_stream(self, device: Any = None) -> _Stream:
        return self._stream

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def memory_allocated(self, device: Any = None) -> int:
        return self.memories[self.index_of(device)].allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.memories[self.index_of(device)].peak

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the bytes that are free, and all."""
        memory = self.memories[self.index_of(device)]
        return memory.total - memory.allocated, memory.total

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU's generator: the device draws from it."""
        generator = torch.default_generator
        generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the CPU's generator, for the same reason."""
        self.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False


_module: DeviceModule | None = None


def module() -> DeviceModule:
    """Return the module of the simulated device of this process.

    Raises:
        AccelError: `simulate` was not called.
    """
    if _module is None:
        raise AccelError(
            "no device is simulated in this process\ncall accel_testing.simulated.device.simulate()"
        )
    return _module


def install(name: str, devices: int) -> bool:
    """Make the module of this process, or let it have as many devices.

    Returns:
        Whether it is new.

    Raises:
        AccelError: the process has one of another name.
    """
    global _module  # noqa: PLW0603 - torch's device type is one a process
    if _module is not None and _module.name != name:
        about = f"this process simulates {_module.name!r} already"
        raise AccelError(f"{about}\nuse {name!r} in a process of its own")
    new = _module is None
    _module = _module or DeviceModule(name)
    _module.memories += [_Memory() for _ in range(devices - _module.device_count())]
    return new
