"""Tensors as bytes and back, for files and for messages between processes."""

from __future__ import annotations

import copyreg
import io
import math
import pickle
from collections import ChainMap
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

DTYPES: Final = {
    name: value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not (name := str(value)[6:]).startswith(("bits", "q"))
}
"""torch's name without the prefix (float32, bfloat16, ...) -> dtype."""
_UNPICKLED: Final = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
"""Dtypes that torch can unpickle.

torch also pickles other dtypes (float8, uint16, complex32, ...), but raises an error when it unpickles them.
"""
_NOT_COPIED: Final = {
    dtype for name, dtype in DTYPES.items() if name.lstrip("uint") in {"1", "2", "3", "4", "5", "6", "7"}
}
"""int1 to uint7: torch cannot copy tensors of these dtypes, but can view them as bytes."""


def copyable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors, viewed as bytes if torch cannot copy their dtype."""
    return [each.view(torch.uint8) if each.dtype in _NOT_COPIED else each for each in tensors]


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without the prefix."""
    return str(dtype).removeprefix("torch.")


@cache
def can_pin(device: torch.device) -> bool:
    """Return True if torch pins memory for this kind of device."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False
    try:
        return torch.empty(1, device="cpu").pin_memory().is_pinned()
    except RuntimeError:  # also NotImplementedError: devices without pinned memory raise either
        return False


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's elements, row-major: a view of its memory if possible.

    The tensor may have any dtype, device and strides. The view keeps its memory alive; the memory must not be
    changed while the view is in use.
    """
    return as_bytes(tensor.cpu()).numpy().data


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements, row-major, as a uint8 tensor of shape (bytes,): a view if possible."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if data.stride() != (1,):  # torch calls a single element contiguous, and `view` refuses its stride
        data = data.as_strided(data.shape, (1,))
    return data.view(torch.uint8)


def tensor_from(buffer: Any, dtype: str, shape: Sequence[int], start: int = 0) -> Tensor:
    """Return a tensor that shares the memory of a writable buffer, from the byte `start` on.

    Raises:
        ValueError: the buffer is too short.
    """
    size = bytes_within(len(buffer), dtype, shape, start)
    if size == 0:
        return torch.empty(tuple(shape), dtype=DTYPES[dtype], device="cpu")
    data = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=start)
    return data.view(DTYPES[dtype]).reshape(tuple(shape))


def bytes_within(length: int, dtype: str, shape: Sequence[int], start: int) -> int:
    """Return the size in bytes of a tensor of this dtype and shape.

    Raises:
        ValueError: the tensor at `start` does not fit into `length` bytes.
    """
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if min(shape, default=0) < 0 or start < 0 or start + size > length:
        raise ValueError(f"{dtype} of shape {list(shape)} at {start} does not fit into {length} bytes")
    return size


def pickled(value: Any) -> bytes:
    """Return a pickled object; its tensors may have any dtype."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return buffer.getvalue()


def _reduced(tensor: Tensor) -> Any:
    known = tensor.dtype in _UNPICKLED or tensor.is_quantized
    if known or tensor.layout is not torch.strided or tensor.is_meta:
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    content = bytes(bytes_of(tensor)), name_of(tensor.dtype), tuple(tensor.shape), tensor.requires_grad
    return _restored, content


def _restored(content: bytes, dtype: str, shape: Sequence[int], requires_grad: bool) -> Tensor:
    return tensor_from(bytearray(content), dtype, shape).requires_grad_(requires_grad)


_OTHERS: Final[Any] = copyreg.dispatch_table
_REDUCERS: Final[Any] = ChainMap({Tensor: _reduced}, _OTHERS)
