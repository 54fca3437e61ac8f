"""Parameters that sharding replaces: their hooks and their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

__all__ = ["replace_parameter", "with_hooks"]

ADVICE = (
    "use a hook of a module (register_forward_hook, register_full_backward_hook), or change p.grad between"
    " backward and optimizer.step()"
)


def with_hooks(models: Sequence[nn.Module], *, after_accumulation: bool) -> Iterator[str]:
    """Reasons against parameters with hooks that a sharded parameter cannot call.

    after_accumulation: for example `register_post_accumulate_grad_hook`.
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
    """Take over the hooks that see reduced gradients, and free the memory of the old parameter."""
    if isinstance(old, DTensor) or not old.numel():  # made by another plugin, or tied
        return
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    old.data = old.data.new_empty(0)
