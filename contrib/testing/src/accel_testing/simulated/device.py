"""The simulated device for torch: tensors over CPU tensors, and `torch.NAME`.

Like an accelerator it refuses operands from another device, counts the bytes it holds, the times
the host reads from it and the times the host would wait for it, and draws random numbers. Unlike one it
draws them from the CPU's generator: torch cannot make a generator for a device without C++.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from accel_core import AccelError
from accel_testing.simulated.autocast import register_autocast
from accel_testing.simulated.group import register_group

__all__ = ["DeviceModule", "SimulatedTensor", "simulate", "unwrap"]

aten: Final = torch.ops.aten
TOTAL_MEMORY: Final = 1 << 36
"""Bytes that the device says it has."""
_CROSS_DEVICE: Final = frozenset(
    {
        aten._to_copy.default,
        aten.copy_.default,
        aten._copy_from.default,
        aten._foreach_copy_.default,
        aten.index_put_.default,
        aten.index.Tensor,
    }
)
_WAITING: Final = frozenset(
    {
        aten._local_scalar_dense.default,
        aten._unique2.default,
        aten.bincount.default,
        aten.equal.default,
        aten.masked_select.default,
        aten.nonzero.default,
        aten.unique_consecutive.default,
        aten.unique_dim.default,
    }
)
"""Operators whose result needs the host: numbers, and sizes that follow values."""


class SimulatedTensor(Tensor):
    """A tensor on the simulated device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> Any:
        """Wrap a CPU tensor, sharing its storage."""
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=module().device(),
        )
        made.held = held
        module().memory.hold(held.untyped_storage())
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.held!r}".removesuffix(")") + f", device='{self.device}')"

    def tolist(self) -> Any:
        """Values as Python numbers; torch refuses this to subclasses."""
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the numbers; the wrapper's has no memory."""
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


def unwrap(value: Any) -> Any:
    """Return the CPU tensor of a simulated one; anything else as it is."""
    return value.held if isinstance(value, SimulatedTensor) else value


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute on the inner tensors, and wrap results that stay on the device."""
    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type != module().name
    if device is not None and not to_host:
        kwargs["device"] = torch.device("cpu")
    if func not in _CROSS_DEVICE:
        _refuse_other_devices(func, args, kwargs)
    if _waits(func, args, kwargs, to_host):
        module().wait(str(func))
    inner_args, inner_kwargs = pytree.tree_map(unwrap, (args, kwargs))
    out = func(*inner_args, **inner_kwargs)
    if func is aten._local_scalar_dense.default or to_host:
        module().read()
        return out
    if func is aten.copy_.default and not isinstance(args[0], SimulatedTensor):
        module().read()
        return args[0]
    wrapped = pytree.tree_map(lambda each: SimulatedTensor(each) if isinstance(each, Tensor) else each, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], to_host: bool) -> bool:
    """Tell if the host of a real accelerator would wait here."""
    if func is aten._to_copy.default:
        return to_host and not kwargs.get("non_blocking")
    if func in (aten.copy_.default, aten._copy_from.default):
        across = isinstance(args[0], SimulatedTensor) is not isinstance(args[1], SimulatedTensor)
        return across and not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    if func is aten._foreach_copy_.default:
        copied = zip(args[0], args[1], strict=True)
        across = any(
            isinstance(to, SimulatedTensor) is not isinstance(of, SimulatedTensor) for to, of in copied
        )
        return across and not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in (aten.index.Tensor, aten.index_put_.default):  # by masks, or by positions that the host has
        at = [each for each in args[1] if each is not None]
        return any(each.dtype == torch.bool or not isinstance(each, SimulatedTensor) for each in at)
    return func in _WAITING


def _refuse_other_devices(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and not isinstance(leaf, SimulatedTensor) and leaf.dim() > 0:
            raise RuntimeError(
                f"{func}: Expected all tensors to be on the same device, but found at least two devices,"
                f" {module().device()} and {leaf.device}!"
            )


class _Memory:
    """Bytes of the storages that live on the device."""

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0
        self._held: set[int] = set()

    def hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return
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

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        """Accept torch's arguments."""

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

    A process sees one device, as where the launcher masks the others: torch's device guard for
    Python devices knows index 0 only.
    """

    Stream, Event = _Stream, _Event

    def __init__(self, name: str) -> None:
        self.name = name
        self.memory = _Memory()
        self.host_reads = 0
        self.on_host_read: Callable[[], None] | None = None
        """Called before the host gets to see a value of the device."""
        self.waits = 0
        """The number of times that the host would have waited for the device."""
        self._waiting: str | int = "default"
        self._stream = _Stream()

    def device(self) -> torch.device:
        """Return the one device."""
        return torch.device(self.name, 0)

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
        self._waiting = debug_mode

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index != 0:
            raise RuntimeError(f"invalid device ordinal {index}: a process sees one {self.name} device")

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
        return self.memory.allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.memory.peak

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the bytes that are free, and all."""
        return TOTAL_MEMORY - self.memory.allocated, TOTAL_MEMORY

    def manual_seed(self, seed: int) -> None:
        """Do nothing: the device draws from the CPU's generator, seeded by torch."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing, for the same reason."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False


_module: DeviceModule | None = None
_libraries: list[torch.library.Library] = []  # a registration lives as long as its library


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


def simulate(name: str = "sim", communication: str = "simccl") -> DeviceModule:
    """Give torch a device type of this name, and torch.distributed a backend for it.

    Once a process: torch's type for third parties can be named only once. A second call with the
    same name changes nothing.

    Raises:
        AccelError: this process simulates a device of another name, or torch is too old.
    """
    global _module  # noqa: PLW0603 - torch's device type is one a process
    if _module is not None:
        if _module.name != name:
            about = f"this process simulates {_module.name!r} already"
            raise AccelError(f"{about}\nuse {name!r} in a process of its own")
        return _module
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError as error:
        raise AccelError(
            f"torch {torch.__version__} cannot have a device in Python\nsimulate it with torch >= 2.10"
        ) from error
    _module = DeviceModule(name)
    _setup_privateuseone_for_python_backend(name, backend_module=_module)
    # Module.to would otherwise put a plain parameter around each simulated tensor.
    torch.__future__.set_swap_module_params_on_conversion(True)
    _register_factories()
    _libraries.extend(register_autocast(name))
    register_group(name, communication, unwrap)
    return _module


def _register_factories() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def empty(size: Any, dtype: Any = None, *rest: Any, **options: Any) -> Any:
        return SimulatedTensor(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, *rest: Any, **options: Any) -> Any:
        return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking and (source.device.type == "cpu" or target.device.type == "cpu"):
            module().wait("copy_")
        unwrap(target).copy_(unwrap(source))
        return target

    for name, kernel in {
        "empty.memory_format": empty,
        "empty_strided": empty_strided,
        "_copy_from": copy_from,
    }.items():
        library.impl(name, kernel, "PrivateUse1")
