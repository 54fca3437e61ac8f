"""Read batches one ahead in this process.

The next one may be read into the memory of this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from accel_core.distributed.nested import recursively_apply, walk
from accel_core.distributed.tensor_bytes import bytes_of

T = TypeVar("T")


def with_last_kept(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield as `with_last`; an item holds what it held when it was read.

    The first one is compared with a copy once the second is read. If it has changed, as a collate function
    with one buffer changes it, items are copies from then on.
    """
    iterator = iter(items)
    try:
        item = next(iterator)
    except StopIteration:
        return
    copies, copied = _copies(item), False
    for following in iterator:
        if copies and (copied or _has_changed(item, copies)):
            item, copied = _put(copies, item), True
        yield item, False
        item, copies = following, _copies(following) if copied else []
    yield item, True


def _is_readable(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_cpu or value.layout is not torch.strided:
        return False
    return not value.is_nested and not value.is_quantized


def _tensors(item: Any) -> Iterator[Tensor]:
    return (value for _, value in walk(item) if _is_readable(value))


def _copies(item: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in _tensors(item)]


def _has_changed(item: Any, copies: Sequence[Tensor]) -> bool:
    pairs = zip(_tensors(item), copies, strict=False)
    return any(bytes_of(tensor) != bytes_of(copy) for tensor, copy in pairs)


def _put(copies: Sequence[Tensor], item: T) -> T:
    """Return the item with these in place of its tensors."""
    each = iter(copies)
    whole: T = recursively_apply(lambda tensor: next(each, tensor), item, test_type=_is_readable)
    return whole
