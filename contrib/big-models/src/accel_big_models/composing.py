"""Weights made of several tensors, such as quantised ones: each part moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from accel_big_models.sources import InMemory, Source

__all__ = [
    "Composed",
    "composed",
    "in_memory",
    "is_composed",
    "is_in_memory",
    "leaves_of",
    "parts_of",
    "sourced",
    "values_of",
]


@frozen(eq=False)
class Composed:
    """A weight whose parts lie in places of their own.

    like: the weight with its parts on the meta device. parts: sources of plain tensors, in its order.
    """

    like: Tensor
    parts: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""
        return tuple(self.like.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the weight shows."""
        return self.like.dtype

    def tensor(self) -> Tensor | None:
        """Return the weight over its parts on the CPU; None if one must be read."""
        parts = [part for part in (each.tensor() for each in self.parts) if part is not None]
        return composed(self.like, iter(parts)) if len(parts) == len(self.parts) else None

    def read(self, target: Tensor) -> None:
        """Fill a weight of the same make."""
        for part, leaf in zip(self.parts, leaves_of(target), strict=True):
            part.read(leaf)


def is_composed(tensor: Tensor) -> bool:
    """Return True for a tensor that torch can take apart."""
    return is_traceable_wrapper_subclass(tensor)


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor is made of: itself, or its parts."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [leaf for name in tensor.__tensor_flatten__()[0] for leaf in leaves_of(getattr(tensor, name))]


def composed(like: Tensor, parts: Iterator[Tensor]) -> Tensor:
    """Make a tensor as `like` is made, of the next parts."""
    if not is_traceable_wrapper_subclass(like):
        return next(parts)
    made: Tensor = transform_subclass(like, lambda _, inner: composed(inner, parts))
    return made


def sourced(tensor: Tensor, parts: Iterator[Source]) -> Source:
    """Return the source of a tensor whose plain parts have the next sources."""
    if not is_composed(tensor):
        return next(parts)
    leaves = leaves_of(tensor.detach())
    like = composed(tensor.detach(), (torch.empty_like(leaf, device="meta") for leaf in leaves))
    return Composed(like, tuple(islice(parts, len(leaves))))


def in_memory(values: Tensor) -> Source:
    """Return the source of a weight that is in host memory."""
    return sourced(values, (InMemory(leaf, leaf.dtype) for leaf in leaves_of(values)))


def is_in_memory(source: Source) -> bool:
    """Return True if no disk is read for the values, and no dtype changes."""
    return all(isinstance(part, InMemory) and part.tensor() is not None for part in parts_of(source))


def parts_of(source: Source) -> tuple[Source, ...]:
    """Return the sources of a weight's plain parts."""
    return source.parts if isinstance(source, Composed) else (source,)


def values_of(source: Source) -> Tensor:
    """Return the values as a CPU tensor: the source's own, or read into memory."""
    values = source.tensor()
    if values is None:
        parts = parts_of(source)
        read = [torch.empty(each.shape, dtype=each.dtype) for each in parts]
        for each, leaf in zip(parts, read, strict=True):
            each.read(leaf)
        values = composed(source.like, iter(read)) if isinstance(source, Composed) else read[0]
    return values
