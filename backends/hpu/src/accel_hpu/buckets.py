"""Padding of batches to a few lengths, because Gaudi compiles a graph for each shape."""

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
    """Return the batch with the entries named in `padding` padded along dimension 1 to the next length.

    Raises:
        ConfigError: an entry is longer than all lengths.
    """
    if isinstance(batch, Mapping):
        entries = {name: _padded(name, value, lengths, padding) for name, value in batch.items()}
        for name, value in entries.items():  # in place, because the mapping's class may have methods
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
            "add a longer bucket, or truncate in the dataset or collate function"
        )
    rest = [0, 0] * (value.ndim - 2)
    return pad(value, [*rest, 0, lengths[bucket] - length], value=padding[name])
