"""Gradients of collectives: the gradient of a sum over ranks is the sum of the ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from accel_core.distributed.logging import get_logger
from accel_core.distributed.nested import leaves, rebuild

_logger = get_logger(__name__)
_REQUIRES: Final = attrgetter("requires_grad")

Backward = Callable[[Sequence[Tensor]], Iterable[Tensor]]
"""Gradients of results -> gradients of inputs. Collective, and differentiable."""


def with_gradient(operation: str, result: Any, inputs: Sequence[Tensor], backward: Backward | None) -> Any:
    """Return a collective's result with the gradient of its inputs.

    Without `backward` the result carries no gradient; if an input requires one, a warning says so once.
    """
    if backward is not None:
        tensors, _ = leaves(result, operation)
        return rebuild(result, _Collective.apply(backward, tensors, *inputs))  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and any(map(_REQUIRES, inputs)):
        _logger.warning_once(
            "%s: its input requires a gradient, which the result does not carry; for a loss, give"
            " gradients=True, which accel_core.ops.%s takes; for a value to look at, give its detach()",
            *(operation, operation),
        )
    return result


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: Backward, results: Sequence[Tensor], *_: Tensor) -> Any:
        ctx.of_inputs = backward
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.of_inputs(gradients)
