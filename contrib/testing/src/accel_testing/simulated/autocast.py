"""Autocast for the simulated device: operators in low precision, or in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

__all__ = ["register_autocast"]

LOW_PRECISION: Final = (
    *("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input"),
)
FLOAT32: Final = (
    *("mse_loss", "l1_loss", "nll_loss", "cross_entropy_loss", "binary_cross_entropy_with_logits", "kl_div"),
    *("layer_norm", "softmax.int", "log_softmax.int", "exp", "log", "pow.Tensor_Scalar", "norm.Scalar"),
)


def register_autocast(name: str) -> list[torch.library.Library]:
    """Register the rules for device type `name`, while the result is kept."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    operators = torch.library.Library("aten", "IMPL")
    for operator in LOW_PRECISION:
        _register(operators, operator, name, lambda: torch.get_autocast_dtype(name))
    for operator in FLOAT32:
        _register(operators, operator, name, lambda: torch.float32)
    return [everything, operators]


def _register(
    library: torch.library.Library, operator: str, name: str, dtype: Callable[[], torch.dtype]
) -> None:
    packet, _, overload = operator.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]

    def cast(value: Any, wanted: torch.dtype) -> Any:
        eligible = isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == name
        return value.to(wanted) if eligible and value.dtype != torch.float64 else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype()
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            args, kwargs = pytree.tree_map(lambda value: cast(value, wanted), (args, kwargs))
            return function(*args, **kwargs)

    library.impl(function.name(), kernel, "AutocastPrivateUse1")
