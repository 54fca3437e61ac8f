"""Losses of transformers' models, over logits split along the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from accel_megatron.library import part

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["IGNORED", "cover_padding", "mean_loss", "next_tokens", "whole"]

IGNORED = -100
"""The label of a token that does not count."""


def cover_padding(output_layer: nn.Module, vocabulary: int) -> None:
    """Give tokens of the vocabulary's padding no probability."""

    def cover(module: Any, inputs: object, found: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = found
        rank, _ = part(module.tp_group)
        held = max(0, min(logits.shape[-1], vocabulary - rank * logits.shape[-1]))
        beyond = logits.shape[-1] - held
        lowest = torch.finfo(logits.dtype).min
        return functional.pad(logits[..., :held], (0, beyond), value=lowest) if beyond else logits, bias

    output_layer.register_forward_hook(cover)


def next_tokens(labels: Tensor) -> Tensor:
    """Return the label that each token's logits are for."""
    return functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits split by vocabulary, over labels that count.

    logits: (batch, sequence, part of the vocabulary). Collective.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    counts = labels != IGNORED
    # It works in place on float32.
    losses: Tensor = vocab_parallel_cross_entropy(logits.clone(), labels.where(counts, 0))
    return (losses * counts).sum() / counts.sum()


def whole(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits of the whole vocabulary. Collective."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    gathered: Tensor = gather_from_tensor_model_parallel_region(logits)
    return gathered[..., :vocabulary]
