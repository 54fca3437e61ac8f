"""Gradients of version 2 that are not reduced yet.

torch keeps them apart from `parameter.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from torch.distributed.fsdp import FSDPModule

from accel_fsdp.unused import is_kept, parameter_groups

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["clear", "clear_with"]

_sharded: Final[WeakKeyDictionary[nn.Module, list[ref[Any]]]] = WeakKeyDictionary()
"""torch's objects for the sharded parameters of each module."""


def clear(sharded: Iterable[Any], parameters: Callable[[], Iterable[Tensor]]) -> None:
    """Drop what these parameters have.

    torch's `zero_grad` does not see it, so it would be added to the next window.

    Args:
        sharded: torch's objects for sharded parameters.
        parameters: Returns those to clear; called if there is something to drop.
    """
    held = [one for one in sharded if is_kept(one)]
    if held:
        cleared = set(map(id, parameters()))
        for one in held:
            if id(one.sharded_param) in cleared:
                _drop(one)


def clear_with(model: nn.Module) -> None:
    """Have `zero_grad` of the model and of its parts clear them too."""
    for module in model.modules():
        for group in parameter_groups(module._get_fsdp_state()) if isinstance(module, FSDPModule) else ():
            for one in group.fsdp_params:
                info = one._module_info
                for holder in (info.module, *info.shared_modules):
                    _sharded.setdefault(holder, []).append(ref(one))
    for module in model.modules():
        vars(module)["zero_grad"] = partial(_zero_grad, module)


def _zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    type(module).zero_grad(module, set_to_none)
    for one in (each() for holder in module.modules() for each in _sharded.get(holder, ())):
        if one is None:
            continue
        if set_to_none:  # after a forward the module has gathered weights, and these their gradients
            one.sharded_param.grad = None
        elif one.sharded_param.grad is not None:
            one.sharded_param.grad.detach().zero_()
        if is_kept(one):
            _drop(one)


def _drop(one: Any) -> None:
    if "unsharded_accumulated_grad" in vars(one):  # in torch 2.15 it is the gathered weight's gradient
        one.unsharded_accumulated_grad = None
    if hasattr(one, "_unsharded_param"):
        one._unsharded_param.grad = None
