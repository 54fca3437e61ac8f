"""Whole weights of a model, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["weights_of"]


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each parameter and persistent buffer, one by one.

    Tied weights come once, under their first name. A tensor is never on the meta device: it is the model's
    own, a view of a file, or read for the caller. Values may not be changed.

    Raises:
        AccelError: a weight is on the meta device and in no file.
    """
    raise NotImplementedError
