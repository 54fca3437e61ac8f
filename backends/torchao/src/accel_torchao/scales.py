"""Scales of weights that are gathered in float8.

torchao can compute the scales of all weights in one reduction and store each on its weight, so that an
all-gather need not reduce. A stored scale is wrong as soon as the weight changes. Scales are therefore
computed before each forward of the model, kept for its backward, and dropped after an optimizer step.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from torch import nn

__all__ = ["compute_scales_in", "drop_scales"]


def compute_scales_in(model: nn.Module) -> None:
    """Add hooks that compute the scales of all weights, in one reduction, before each forward of the model.

    Collective, as the forward is. The backward gathers with the scales of its forward. A part of the model
    that is called alone gathers without stored scales, which costs a reduction per weight.
    """
    scales = _Scales()
    model.register_forward_pre_hook(scales.compute, prepend=True)  # before the strategy's hook gathers
    model.register_forward_hook(scales.end, always_call=True)
    for part in model.modules():
        if part is not model and isinstance(part, FSDPModule):
            part.register_forward_pre_hook(scales.check, prepend=True)


def drop_scales(model: nn.Module) -> None:
    """Remove the stored scales of all weights, which may be about to change."""
    for parameter in model.parameters():
        weight: Any = getattr(parameter, "_local_tensor", parameter)  # `to_local()` copies without the scale
        if getattr(weight, "_precomputed_scale", None) is not None:
            weight._precomputed_scale = None


@define(eq=False)
class _Scales:
    inside: bool = False
    """True during a forward of the whole model."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compute(self, model: nn.Module, _args: Any) -> None:
        with warnings.catch_warnings():
            # At its import torchao warns about kernels that this machine does not have.
            warnings.simplefilter("ignore")
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
        precompute_float8_dynamic_scale_for_fsdp(model)
        self.inside = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, model: nn.Module, _args: Any, _output: Any) -> None:
        self.inside = False
        if not torch.is_grad_enabled():  # no backward will need the scales
            drop_scales(model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def check(self, part: nn.Module, _args: Any) -> None:
        # A forward of a part alone may see scales from before an edit of its weights. Recomputation in
        # backward also runs parts outside of the model's forward, and needs the scales of that forward.
        recomputes = torch._C._current_graph_task_id() != -1
        if not self.inside and not recomputes:
            drop_scales(part)
