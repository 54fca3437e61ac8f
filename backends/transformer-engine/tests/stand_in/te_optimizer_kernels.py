"""Kernels of Transformer Engine's optimizers over lists of tensors, by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale"]


@torch.no_grad()
def multi_tensor_adam(
    _chunk_size: int,
    _overflow: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    assert decoupled
    assert bias_correction
    for gradient, parameter, first, second in zip(*lists, strict=True):
        parameter.mul_(1 - lr * weight_decay)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (second / (1 - beta2**step)).sqrt_().add_(eps)
        parameter.addcdiv_(first, size, value=-lr / (1 - beta1**step))


def multi_tensor_l2norm(
    _chunk_size: int, _overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Any]:
    assert not per_tensor
    norms = [torch.linalg.vector_norm(each.float()) for each in lists[0]]
    return torch.stack(norms).square().sum().sqrt().reshape(1), None


@torch.no_grad()
def multi_tensor_scale(_chunk_size: int, _overflow: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
