"""The simulated device for torch: tensors over CPU tensors.

Like an accelerator it refuses operands from another device, counts the bytes it holds, the times
the host reads from it and the times the host would wait for it, and draws random numbers. Unlike one it
draws them from the CPU's generator: torch cannot make a generator for a device without C++.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from accel_core import AccelError
from accel_testing.simulated.autocast import register_autocast
from accel_testing.simulated.device_module import DeviceModule, install, module
from accel_testing.simulated.group import register_group

__all__ = ["DeviceModule", "SimulatedTensor", "module", "simulate", "unwrap"]

aten: Final = torch.ops.aten
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
    def __new__(cls: Any, held: Tensor, device: torch.device | None = None) -> Any:
        """Wrap a CPU tensor, sharing its storage.

        device: None for the current one.
        """
        at = module().index_of(device)
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(module().name, at),
        )
        made.held = held
        module().memories[at].hold(held.untyped_storage())
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
    here = next(
        each.device for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, SimulatedTensor)
    )
    if device is not None and not to_host:
        here, kwargs["device"] = device, torch.device("cpu")
    if func not in _CROSS_DEVICE:
        _refuse_other_devices(func, args, kwargs)
    if func is aten._foreach_copy_.default and len({target.device for target in args[0]}) > 1:
        raise RuntimeError(f"{func}: a list of tensors on several devices, which XLA takes with a segfault")
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
    wrapped = pytree.tree_map(
        lambda each: SimulatedTensor(each, here) if isinstance(each, Tensor) else each, out
    )
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
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    found = {str(leaf.device) for leaf in tensors if leaf.dim() > 0 or isinstance(leaf, SimulatedTensor)}
    if len(found) > 1:
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found at least two devices,"
            f" {' and '.join(sorted(found, reverse=True))}!"
        )


_libraries: list[torch.library.Library] = []  # a registration lives as long as its library


def simulate(name: str = "sim", communication: str = "simccl", devices: int = 1) -> DeviceModule:
    """Give torch a device type of this name, and torch.distributed a backend for it.

    Once a process: torch's type for third parties can be named only once. A second call with the
    same name adds devices at most.

    Args:
        name: of the type.
        communication: the name of the backend.
        devices: how many of them this process sees, at the least.

    Raises:
        AccelError: this process simulates a device of another name, or torch is too old.
    """
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError as error:
        raise AccelError(
            f"torch {torch.__version__} cannot have a device in Python\nsimulate it with torch >= 2.10"
        ) from error
    if not install(name, devices):
        return module()
    _setup_privateuseone_for_python_backend(name, backend_module=module())
    # Module.to would otherwise put a plain parameter around each simulated tensor.
    torch.__future__.set_swap_module_params_on_conversion(True)
    _register_factories()
    _libraries.extend(register_autocast(name))
    register_group(name, communication, unwrap)
    return module()


def _register_factories() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def empty(size: Any, dtype: Any = None, *rest: Any, **options: Any) -> Any:
        return SimulatedTensor(torch.empty(size, dtype=dtype), options.get("device"))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, *rest: Any, **options: Any) -> Any:
        return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype), options.get("device"))

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
