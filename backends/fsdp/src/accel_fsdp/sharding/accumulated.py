"""Gradients of version 2 that are not reduced yet.

torch keeps them apart from `parameter.grad`, and its `zero_grad` does not see them. Its own way to drop them,
`reset_iter_state` of torch 2.13, drops them for all optimizers of a model, while one may clear its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["clear", "clear_with", "param_groups", "parameters_of", "sharded_parameters"]


def clear(models: Iterable[nn.Module], parameters: Iterable[Tensor]) -> None:
    """Drop the gradients of these parameters, so that they are not added to the next window."""
    cleared = set(map(id, parameters))
    for one in (one for model in models for one in sharded_parameters(model)):
        if id(one.sharded_param) in cleared:
            if "unsharded_accumulated_grad" in vars(one):  # in torch 2.15 the gathered weight's gradient
                one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None


def clear_with(model: nn.Module) -> None:
    """Have the model's `zero_grad` clear them too, also between a forward and its backward.

    Then the model has gathered weights; in plain torch, the gradients of earlier steps would stay.
    """
    vars(model)["zero_grad"] = partial(_zero_grad, model)


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    type(model).zero_grad(model, set_to_none)
    clear([model], model.parameters())


def sharded_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield torch's objects for the model's sharded parameters."""
    for group in param_groups(model.modules()):
        yield from group.fsdp_params


def parameters_of(module: FSDPModule) -> Iterator[Any]:
    """Yield torch's objects for the parameters that are sharded with this module."""
    for group in param_groups([module]):
        yield from group.fsdp_params


def param_groups(modules: Iterable[object]) -> list[Any]:
    """Return torch's groups of parameters that are gathered together; modules may share one."""
    states: list[Any] = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
    return [group for state in dict.fromkeys(states) for group in state._fsdp_param_groups]
