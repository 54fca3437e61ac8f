"""Scales of weights that are gathered in float8, as new as the weights."""

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
    """Have each forward of the model first compute all its scales, in one reduction.

    Collective, as the forward is. The backward gathers by the scales of its forward. Parts of the model that
    are called alone gather without scales, which is a reduction per weight.
    """
    scales = _Scales()
    model.register_forward_pre_hook(scales.compute, prepend=True)  # before the strategy's own hook gathers
    model.register_forward_hook(scales.end, always_call=True)
    for part in model.modules():
        if part is not model and isinstance(part, FSDPModule):
            part.register_forward_pre_hook(scales.check, prepend=True)


def drop_scales(model: nn.Module) -> None:
    """Forget the scales: the weights may change."""
    for parameter in model.parameters():
        weight: Any = getattr(parameter, "_local_tensor", parameter)  # `to_local` is a copy without scales
        if getattr(weight, "_precomputed_scale", None) is not None:
            weight._precomputed_scale = None


@define(eq=False)
class _Scales:
    inside: bool = False
    """True in a forward of the whole model."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compute(self, model: nn.Module, _args: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torchao's own import, for kernels that this machine lacks
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
        precompute_float8_dynamic_scale_for_fsdp(model)
        self.inside = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, model: nn.Module, _args: Any, _output: Any) -> None:
        self.inside = False
        if not torch.is_grad_enabled():
            drop_scales(model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def check(self, part: nn.Module, _args: Any) -> None:
        recomputes = torch._C._current_graph_task_id() != -1
        if not self.inside and not recomputes:
            drop_scales(part)
