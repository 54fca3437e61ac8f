"""Gradients of version 2 that are not reduced yet.

torch keeps them apart from `parameter.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from accel_fsdp.unused import parameter_groups

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["clear", "clear_with"]


def clear(sharded: Iterable[Any], parameters: Callable[[], Iterable[Tensor]]) -> None:
    """Drop what these parameters have.

    torch's `zero_grad` does not see it, so it would be added to the next window.

    Args:
        sharded: torch's objects for sharded parameters.
        parameters: Returns those to clear; called if there is something to drop.
    """
    held = [one for one in sharded if _holds(one)]
    if held:
        cleared = set(map(id, parameters()))
        for one in held:
            if id(one.sharded_param) in cleared:
                one.unsharded_accumulated_grad = None
                if hasattr(one, "_unsharded_param"):
                    one._unsharded_param.grad = None


def clear_with(model: nn.Module) -> None:
    """Have the model's own `zero_grad` clear them too."""
    vars(model)["zero_grad"] = partial(_zero_grad, model)


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    type(model).zero_grad(model, set_to_none)
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in parameter_groups(module._get_fsdp_state())
    ]
    clear((one for group in groups for one in group.fsdp_params), model.parameters)


def _holds(one: Any) -> bool:
    gathered = getattr(one, "_unsharded_param", None)
    return one.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)
