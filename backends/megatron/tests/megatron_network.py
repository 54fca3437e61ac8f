"""What the conformance kit trains where ranks share a model: a small GPT-2 of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron_jobs import VOCABULARY, quiet
from torch import Tensor, nn
from torch.utils.data import TensorDataset

LENGTH = 6
MICROBATCHES = 2
"""Stages take no fewer in a window."""


def network(seed: int = 0, *, noise: float = 0.0, larger: bool = False) -> nn.Module:
    with quiet():
        from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=8 if larger else 4,
        n_head=2,
        resid_pdrop=noise,
        embd_pdrop=noise,
        attn_pdrop=noise,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def dataset(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(VOCABULARY, (samples, LENGTH), generator=generator))


def forward_loss(model: nn.Module, batch: Any) -> tuple[Tensor, None]:
    (ids,) = batch
    return model(input_ids=ids, labels=ids).loss, None


def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    # The distributed optimizer is AdamW; with this eps it steps by gradients, not by their signs.
    return torch.optim.AdamW(parameters, lr=lr, eps=1.0)
