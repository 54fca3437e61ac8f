"""Giving memory back, and finding the batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

from accel_core import AccelError, is_out_of_memory
from accel_core import find_executable_batch_size as _find

_NONE: Final = "No executable batch size found, reached zero."


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Let the device's allocator give back what it caches."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        module: Any = torch.get_device_module(torch.accelerator.current_accelerator())
        if hasattr(module, "empty_cache"):  # torch's own function asserts an allocator of its own kind
            module.empty_cache()


def should_reduce_batch_size(exception: Exception) -> bool:
    """Tell whether an exception says that memory ran out."""
    return is_out_of_memory(exception)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Decorate: call with ever smaller batch sizes until memory suffices."""
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    others = [*inspect.signature(function).parameters][1:]
    size = starting_batch_size

    @functools.wraps(function)
    def noting(batch_size: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal size
        size = batch_size  # where the next call begins
        return function(batch_size, *args, **kwargs)

    def search(*args: Any, **kwargs: Any) -> Any:
        if len(others) < len(args):
            name = getattr(function, "__name__", "function")
            shown = ", ".join(f"{each}={value}" for each, value in zip(others, args[1:], strict=False))
            raise TypeError(
                f"Batch size was passed into `{name}` as the first argument when called.\n"
                f"Remove this as the decorator already does so: `{name}({shown})`"
            )
        if size < 1:
            raise RuntimeError(_NONE)
        try:
            return _find(noting, size, reduce_batch_size_fn or (lambda: int(size * 0.9)))(*args, **kwargs)
        except AccelError as error:
            if "ran out of memory with each batch size" not in str(error):
                raise
            raise RuntimeError(_NONE) from error

    return functools.wraps(function)(search)
