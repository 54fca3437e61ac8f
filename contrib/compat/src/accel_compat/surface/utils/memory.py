"""Giving memory back, and finding the batch size that fits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from accel_compat.refusing import unserved
from accel_core import find_executable_batch_size as _find
from accel_core import is_out_of_memory, release_memory

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Let the device's allocator give back what it caches."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether it says that memory ran out."""
    return is_out_of_memory(exception)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Decorator: call with smaller and smaller batch sizes until memory suffices."""
    return _find(function, starting_batch_size, reduce_batch_size_fn)


__getattr__ = unserved(__name__)
