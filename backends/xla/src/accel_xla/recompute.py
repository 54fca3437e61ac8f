"""Activation checkpointing on XLA devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_core import ops

__all__ = ["recomputed"]


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function now and again in backward, without keeping its activations.

    torch's `checkpoint` does not support XLA devices. torch_xla's `checkpoint` keeps the compiler from
    merging both calls, but handles only tensors that are arguments or results themselves. This function also
    finds tensors inside of structures.

    Raises:
        TypeError: the result contains an object that is not a structure; its tensors would get no gradients.
    """
    from torch_xla import device
    from torch_xla.utils.checkpoint import checkpoint

    results: list[Any] = []

    def call(_: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = _with_tensors(inputs, tensors)
        outputs, result = _without_tensors(function(*args, **kwargs))
        ops.recursively_apply(recomputed_result, result, test_type=_is_plain, error_on_other_type=True)
        results[:] = [result]
        return tuple(outputs)

    tensors, inputs = _without_tensors((args, kwargs))
    # `checkpoint` computes gradients only if an input requires them. Parameters are not inputs, and a batch
    # does not require gradients, so one more input does.
    anchor = torch.zeros((), device=device(), requires_grad=True)
    outputs = checkpoint(call, anchor, *tensors)
    return _with_tensors(results[0], outputs)


class _Place(int):
    """Index in the list of tensors that were taken out of a structure, in place of the tensor."""


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
    """Return a leaf of a result unchanged; `recursively_apply` puts this function's name into its error."""
    return value
