"""Keep batches that are read ahead in this process.

A collate function or a dataset that has one buffer reads the next one into the memory of this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
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
_ARRAYS: Final = {np.ndarray, np.memmap}
"""Arrays that are their memory. Others may have more than that: a mask."""
_NUMPYS: Final = {
    *(torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool),
}
_SMALL: Final = 1 << 16
"""Bytes below which a copy of them costs less than NumPy's comparison."""


def with_last_kept(pairs: Iterable[tuple[T, S]]) -> Iterator[tuple[tuple[T, S], bool]]:
    """Yield as `with_last`: pairs of an item, and of something else.

    Items are as they were when they were read.
    """
    for (kept, beside), last in with_last((keep(item), beside) for item, beside in pairs):
        yield (kept(), beside), last


def with_first_kept(items: Iterator[T], count: int) -> tuple[Sequence[T], Iterator[T]]:
    """Return (copies of the first items, all items), as they were when read.

    The first ones are read together, here and now. Nothing that is done to an item changes its copy.
    """
    first = deque((item, _copy(item)) for item in islice(items, count))

    def all_items() -> Iterator[T]:
        while first:
            item, copy = first.popleft()
            yield item if _is_alike(item, copy) else _copy(copy)
        yield from items

    return [copy for _, copy in first], all_items()


def keep(item: T) -> Callable[[], T]:
    """Return a function that gives the item as it is now.

    That is the item itself, or a copy of it once it has changed. Nothing but a copy of each tells: a buffer
    may be a new one now and then, and arrays count no changes.
    """
    copy: T = _copy(item)
    return lambda: item if _is_alike(item, copy) else copy


def _copy(value: Any) -> Any:
    """Copy containers and memory."""
    kind = type(value)
    if kind is Tensor and _is_plain(value):
        return value.clone()
    if kind is dict:
        return {key: child if type(child) in _CONSTANT else _copy(child) for key, child in value.items()}
    if kind is list or kind is tuple:
        return kind([child if type(child) in _CONSTANT else _copy(child) for child in value])
    return recursively_apply(_copy_memory, value, test_type=_is_memory)


def _is_alike(value: Any, copy: Any) -> bool:
    """Return whether a value is what it was when copied; False if nobody can tell."""
    if value is copy:
        return True
    kind = type(value)
    if kind is not type(copy) and not (isinstance(value, Tensor) and isinstance(copy, Tensor)):
        return False
    if kind is Tensor and _is_plain(value):
        same = value.dtype is copy.dtype and value.shape == copy.shape
        return same and _equals(value.numpy(), copy.numpy())
    if kind is list or kind is tuple:
        return len(value) == len(copy) and all(map(_is_alike, value, copy))
    if _is_memory(value):
        return _is_alike_memory(value, copy)
    found, copied = children_of(value), children_of(copy)
    if found is None or copied is None or [*found[0]] != [*copied[0]]:
        return False
    return all(map(_is_alike, found[1], copied[1]))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is one that NumPy can read as it is."""
    if tensor.dtype not in _NUMPYS or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_nested or tensor.requires_grad or tensor.is_neg()) and tensor.is_contiguous()


def _is_memory(value: Any) -> bool:
    """Return whether the value is memory, which can be copied."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if not isinstance(value, Tensor):
        return isinstance(value, bytearray)
    if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
        return False
    if not value.is_cpu:
        return not value.requires_grad  # gradients are for the tensor itself
    return type(value).__torch_dispatch__ is Tensor.__torch_dispatch__  # others wrap tensors


def _is_alike_memory(value: Any, copy: Any) -> bool:
    if isinstance(value, bytearray):
        return bool(value == copy)
    if value.dtype != copy.dtype or value.shape != copy.shape:
        return False
    if isinstance(value, Tensor):  # a device is not waited for, not even to compare
        return value.is_cpu and _equals(_bytes(value), _bytes(copy))
    return type(value) in _ARRAYS and _equals(np.ascontiguousarray(value), np.ascontiguousarray(copy))


def _equals(array: Any, copy: Any) -> bool:
    """Return whether contiguous arrays have the same bytes."""
    if array.nbytes < _SMALL:
        return bool(array.tobytes() == copy.tobytes())
    return np.array_equal(*(_words(each.reshape(-1).view(np.uint8)) for each in (array, copy)))


def _words(data: Any) -> Any:
    """Return bytes as integers, as large ones as they fill: those are compared fast."""
    return data if data.size % 8 else data.view(np.int64)


def _copy_memory(value: Any) -> Any:
    if not isinstance(value, Tensor):
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


def _bytes(tensor: Tensor) -> Any:
    dense = _once(tensor).resolve_conj().resolve_neg().contiguous()
    # `reshape` would leave the stride of a single element as it is, which `view` refuses.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
