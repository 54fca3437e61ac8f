"""Keep batches that are read ahead in this process.

A collate function or a dataset that has one buffer reads the next one into the memory of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import NoneType
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from accel_core.data.sharding import with_last
from accel_core.distributed.nested import children_of, recursively_apply

S = TypeVar("S")
T = TypeVar("T")

_CONSTANT: Final = {bool, bytes, float, int, NoneType, str}


def with_last_kept(pairs: Iterable[tuple[T, S]]) -> Iterator[tuple[tuple[T, S], bool]]:
    """Yield as `with_last`: pairs of an item, and of something else.

    Items are as they were when they were read.
    """
    for (kept, beside), last in with_last((keep(item), beside) for item, beside in pairs):
        yield (kept(), beside), last


def keep(item: T) -> Callable[[], T]:
    """Return a function that gives the item as it is now.

    That is the item itself, or a copy of it once it has changed. Nothing but a copy of each tells: a buffer
    may be a new one now and then, and arrays count no changes.
    """
    copy: T = _copy(item)
    return lambda: item if _is_alike(item, copy) else copy


def _copy(value: Any) -> Any:
    """Copy containers, tensors and arrays."""
    kind = type(value)
    if kind is dict:
        return {key: child if type(child) in _CONSTANT else _copy(child) for key, child in value.items()}
    if kind is list or kind is tuple:
        return kind([child if type(child) in _CONSTANT else _copy(child) for child in value])
    return recursively_apply(_copy_memory, value, test_type=_is_memory)


def _is_alike(value: Any, copy: Any) -> bool:
    """Return whether a value is what it was when it was copied."""
    if value is copy:
        return True
    if _is_memory(value):
        return _is_memory(copy) and value.shape == copy.shape and np.array_equal(_words(value), _words(copy))
    found, copied = children_of(value), children_of(copy)
    if found is None or copied is None or [*found[0]] != [*copied[0]]:
        return False
    return all(a is b or _is_alike(a, b) for a, b in zip(found[1], copied[1], strict=True))


def _is_memory(value: Any) -> bool:
    """Return whether the value is memory that can be read here."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if not isinstance(value, Tensor) or not value.is_cpu or value.layout is not torch.strided:
        return False
    return not value.is_nested and not value.is_quantized


def _copy_memory(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    copy = _once(value).clone()
    copy = copy if copy.shape == value.shape else copy.expand_as(value)
    return copy.requires_grad_() if value.requires_grad else copy


def _once(tensor: Tensor) -> Tensor:
    """Return a tensor without the repetitions of expanded dimensions."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    return tensor[tuple(slice(None) if step else slice(1) for step in tensor.stride())]


def _words(value: Any) -> Any:
    """Return memory as integers, as large ones as it has: those are compared fast."""
    if isinstance(value, Tensor):
        dense = _once(value).resolve_conj().resolve_neg().contiguous()
        # `reshape` would leave the stride of a single element as it is, which `view` refuses.
        data = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    else:
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return data if data.size % 8 else data.view(np.int64)
