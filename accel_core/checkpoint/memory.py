"""Tensors as bytes, and bytes as tensors, without copying and without numpy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["bytes_of", "tensor_from"]


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's elements, row-major: a view of its memory where that is possible.

    Any dtype, device and strides. The view keeps what it reads alive; nobody else should write.
    """
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    memory = (
        (ctypes.c_ubyte * data.nbytes).from_address(data.data_ptr())
        if data.nbytes
        else (ctypes.c_ubyte * 0)()
    )
    memory.owner = data  # type: ignore[attr-defined]
    return memoryview(memory)


def tensor_from(buffer: Any, dtype: torch.dtype, shape: Sequence[int], start: int = 0) -> Tensor:
    """A tensor over the bytes of a writable buffer, from `start` on.

    Raises:
        ValueError: the buffer is too short.
    """
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or start < 0 or start + size > len(buffer):
        raise ValueError(f"{dtype} of shape {list(shape)} at {start} does not fit into {len(buffer)} bytes")
    if size == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return (
        torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=start)
        .view(dtype)
        .reshape(tuple(shape))
    )
