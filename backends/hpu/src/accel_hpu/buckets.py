"""Batches of few lengths.

A graph is compiled for each shape, so sequences are padded to a few.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn.functional import pad

from accel_core import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["padded"]


def padded(batch: Any, lengths: Sequence[int], padding: Mapping[str, float]) -> Any:
    """Pad the entries that `padding` names to one of these lengths (dimension 1).

    Raises:
        ConfigError: an entry is longer than the longest of them.
    """
    if isinstance(batch, Mapping):
        found = {name: _padded(name, value, lengths, padding) for name, value in batch.items()}
        for name, value in found.items():  # keeps the type, which may have methods of its own
            if value is not batch[name]:
                batch[name] = value  # type: ignore[index]
        return batch
    if isinstance(batch, (tuple, list)) and type(batch) in (tuple, list):
        return type(batch)(
            _padded(str(number), value, lengths, padding) for number, value in enumerate(batch)
        )
    return batch


def _padded(name: str, value: Tensor, lengths: Sequence[int], padding: Mapping[str, float]) -> Tensor:
    if name not in padding or value.ndim < 2:
        return value
    length = value.shape[1]
    bucket = bisect_left(lengths, length)
    if bucket == len(lengths):
        raise ConfigError(
            f"hpu.buckets: {name} of this batch has length {length}, the longest bucket is {lengths[-1]}\n"
            "add a longer one, or truncate in the dataset or collate function"
        )
    rest = [0, 0] * (value.ndim - 2)
    return pad(value, [*rest, 0, lengths[bucket] - length], value=padding[name])
