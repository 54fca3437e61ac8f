"""Parameters that sharding replaces: their hooks, their memory, their conversions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["guard_conversions", "replace_parameter", "with_hooks"]

ADVICE = (
    "use a hook of a module (register_forward_hook, register_full_backward_hook), or change p.grad between"
    " backward and optimizer.step()"
)


def with_hooks(models: Sequence[nn.Module], *, after_accumulation: bool) -> Iterator[str]:
    """Reasons against parameters with hooks that a sharded parameter cannot call.

    after_accumulation: `register_post_accumulate_grad_hook` is one of them.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter._backward_hooks:
                yield f"{name} has a hook (register_hook), which would never see its whole gradient\n{ADVICE}"
            if after_accumulation and parameter._post_accumulate_grad_hooks:
                yield (
                    f"{name} has a hook (register_post_accumulate_grad_hook), which would never be called\n"
                    f"{ADVICE}, or set fsdp.fsdp_version: 2"
                )


def replace_parameter(old: nn.Parameter, new: nn.Parameter) -> None:
    """Take over the hooks that see reduced gradients, and free the memory of what is replaced."""
    if isinstance(old, DTensor) or not old.numel():  # made by another plugin, or tied
        return
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    old.data = old.data.new_empty(0)


def guard_conversions(model: nn.Module) -> None:
    """Let `model.to(device)` and the like pass where they change nothing.

    torch swaps each sharded parameter for its conversion, also if that is itself, which cannot be done to
    those that core follows.
    """
    vars(model)["_apply"] = partial(_apply, model)


def _apply(model: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    modules = [*model.modules()] if recurse else [model]
    for module in modules:
        if isinstance(module, FSDPModule):  # a conversion of gathered weights would be lost
            module.reshard()
    tables: list[dict[str, Any]] = [module._parameters for module in modules]
    sharded = [{key: p for key, p in table.items() if isinstance(p, DTensor)} for table in tables]
    with torch.no_grad():
        if any(convert(each) is not each for held in sharded for each in held.values()):
            converted: nn.Module = type(model)._apply(model, convert, recurse)
            return converted
    try:
        for module, held in zip(modules, sharded, strict=True):
            module._parameters.update(dict.fromkeys(held))
            nn.Module._apply(module, convert, recurse=False)
    finally:
        for table, held in zip(tables, sharded, strict=True):
            table.update(held)
    return model
