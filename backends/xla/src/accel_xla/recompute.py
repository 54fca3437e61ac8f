"""Activations that are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from accel_core import AccelError

__all__ = ["recomputed"]


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and again in backward.

    Torch's own `checkpoint` takes no XLA devices. torch_xla's keeps the compiler from computing both calls as
    one, and sees only tensors that are arguments or results of their own: here they may lie in containers.

    Raises:
        AccelError: a result is an object in which tensors, if any, would lose their gradients.
    """
    from torch_xla import device
    from torch_xla.utils.checkpoint import checkpoint

    leaves, given = tree_flatten((args, kwargs))
    results: list[TreeSpec] = []

    def call(_: Any, *leaves: Any) -> tuple[Any, ...]:
        args, kwargs = tree_unflatten(leaves, given)
        found, spec = tree_flatten(function(*args, **kwargs))
        results[:] = [spec]
        if odd := [type(leaf).__name__ for leaf in found if not isinstance(leaf, _RESULTS)]:
            raise AccelError(
                f"checkpoint_function: the function returns a {odd[0]}; tensors in it would get no gradients\n"
                "return tensors, or lists, tuples and dicts of them"
            )
        return tuple(found)

    # Results need gradients only if an input does, and a batch does not.
    anchor = torch.zeros((), device=device(), requires_grad=True)
    return tree_unflatten(checkpoint(call, anchor, *leaves), results[0])


_RESULTS = (torch.Tensor, int, float, str, type(None))
