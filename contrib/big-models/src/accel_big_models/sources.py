"""Places that a weight's values come from when they are not on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["InCheckpoint", "InMemory", "Source"]


class Source(Protocol):
    """A weight's values in host memory or in a file.

    shape and dtype: as the weight is computed.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which the weight is computed."""

    def tensor(self) -> Tensor | None:
        """Return the values as a CPU tensor, uncopied; None if they must be read."""

    def read(self, target: Tensor) -> None:
        """Fill a contiguous CPU tensor of this shape and dtype."""


@frozen(eq=False)
class InMemory:
    """A weight in host memory, or in a file that torch has mapped.

    values: a CPU tensor. dtype: as it is computed.
    """

    values: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""
        return tuple(self.values.shape)

    def tensor(self) -> Tensor | None:
        """Return the values, or None if their dtype is another."""
        return self.values if self.values.dtype == self.dtype else None

    def read(self, target: Tensor) -> None:
        """Fill a CPU tensor of the weight's shape and dtype."""
        target.copy_(self.values)


@frozen(eq=False)
class InCheckpoint:
    """A weight of a checkpoint of accel-core that lies there in several pieces.

    stored: as core's `stored_weights` gives it. dtype: as it is computed.
    """

    stored: Any
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""
        return tuple(self.stored.shape)

    def tensor(self) -> None:
        """Return None: the pieces have to be read."""

    def read(self, target: Tensor) -> None:
        """Fill a CPU tensor of the weight's shape and dtype."""
        self.stored.read(target)
