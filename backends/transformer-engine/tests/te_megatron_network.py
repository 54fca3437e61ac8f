"""What the kit trains under megatron in float8: a small GPT-2, whose layers have multiples of 16 features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron_jobs import quiet
from torch import Tensor, nn
from torch.utils.data import TensorDataset

LENGTH, VOCABULARY = 16, 64
MICROBATCHES = 2
"""Stages take no fewer in a window."""


def network(seed: int = 0, *, noise: float = 0.0, larger: bool = False) -> nn.Module:
    with quiet():
        from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=4 if larger else 2,
        n_head=2,
        resid_pdrop=noise,
        embd_pdrop=noise,
        attn_pdrop=0.0,  # the stand-in of attention has no dropout
        bos_token_id=0,
        eos_token_id=0,
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
    # It steps by gradients, not by their signs, which rounding changes.
    return torch.optim.AdamW(parameters, lr=lr, eps=1.0)
