"""Activations that are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_core import ops

__all__ = ["recomputed"]


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and again in backward.

    Torch's own `checkpoint` takes no XLA devices. torch_xla's keeps the compiler from computing both calls as
    one, and sees only tensors that are arguments or results of their own: here they may lie in structures.

    Raises:
        TypeError: the result has an object in it, in which tensors would get no gradients.
    """
    from torch_xla import device
    from torch_xla.utils.checkpoint import checkpoint

    results: list[Any] = []

    def call(_: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = _with_tensors(given, tensors)
        found, result = _without_tensors(function(*args, **kwargs))
        ops.recursively_apply(recomputed_result, result, test_type=_is_plain, error_on_other_type=True)
        results[:] = [result]
        return tuple(found)

    tensors, given = _without_tensors((args, kwargs))
    # Results need gradients only if an input does, and a batch does not.
    anchor = torch.zeros((), device=device(), requires_grad=True)
    found = checkpoint(call, anchor, *tensors)
    return _with_tensors(results[0], found)


class _Place(int):
    """Of a tensor in a list, where it has been taken from a structure."""


def _without_tensors(structure: Any) -> tuple[list[Tensor], Any]:
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> _Place:
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    return tensors, ops.recursively_apply(take, structure)


def _with_tensors(structure: Any, tensors: Sequence[Tensor]) -> Any:
    return ops.recursively_apply(tensors.__getitem__, structure, test_type=_is_place)


def _is_place(value: Any) -> bool:
    return isinstance(value, _Place)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str))


def recomputed_result(value: Any) -> Any:
    """Return a leaf of a result as it is.

    `recursively_apply` says this name in its error.
    """
    return value
