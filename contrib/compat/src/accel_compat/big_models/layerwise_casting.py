"""Weights stored in a small dtype and cast to a larger one for each forward."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from accel_compat.big_models.hooks import ModelHook, add_hook_to_module, outside_graphs
from accel_compat.environment.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING

if TYPE_CHECKING:
    import torch
    from torch import nn


class LayerwiseCastingHook(ModelHook):
    """Keep a module in `storage_dtype`, and in `compute_dtype` during its forward."""

    _is_stateful = False

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the module to the dtype it is stored in."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @outside_graphs
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Cast the module to the dtype it computes in."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @outside_graphs
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cast the module to the dtype it is stored in."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store weights of a model in one dtype, and compute in another.

    These are the weights of linear layers and convolutions.

    skip_modules_pattern: regular expressions; modules in whose names one is found stay, with all below.
    skip_modules_classes: modules of these classes stay.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    waiting = [("", module)]
    while waiting:
        name, each = waiting.pop()
        if isinstance(each, skip_modules_classes or ()) or any(re.search(found, name) for found in patterns):
            continue
        if isinstance(each, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(each, hook, append=True)
        else:
            waiting += [(f"{name}.{child}" if name else child, part) for child, part in each.named_children()]
