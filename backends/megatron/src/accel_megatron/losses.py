"""What transformers computes from logits, over logits that are split along the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IGNORED", "cover_padding", "mean_loss", "next_tokens", "whole"]

IGNORED = -100
"""The label of a token that does not count."""


def cover_padding(logits: Tensor, rank: int, vocabulary: int) -> Tensor:
    """No token of the vocabulary's padding can be meant: (..., part of the vocabulary) -> the same."""
    held = max(0, min(logits.shape[-1], vocabulary - rank * logits.shape[-1]))
    if held == logits.shape[-1]:
        return logits
    lowest = torch.finfo(logits.dtype).min
    return functional.pad(logits[..., :held], (0, logits.shape[-1] - held), value=lowest)


def next_tokens(labels: Tensor) -> Tensor:
    """The label that each token's logits are for."""
    return functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of (batch, sequence, part of the vocabulary) over labels that count. Collective."""
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
