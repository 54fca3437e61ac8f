"""A small language model learns as well in float8 as in bfloat16."""

from __future__ import annotations

import statistics

import pytest
import torch
from float8_problem import loss_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from accel_core import Accelerator

STEPS, WIDTH, WORDS, LENGTH = 150, 32, 16, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.heads(self.before(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.behind(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.words(ids) + self.places[: ids.shape[1]])))


def learnt(precision: str) -> tuple[float, float]:
    """The first loss, and the mean of the last ten, on sentences that have one continuation each."""
    torch.manual_seed(0)
    run = Accelerator(device="cpu", mixed_precision=precision)
    net = Model()
    nn.init.normal_(net.words.weight, std=0.1)
    net, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.0))
    words = [torch.arange(LENGTH) * step + first for first in range(2) for step in (1, 3, 5, 7)]
    ids = torch.stack(words) % (WORDS - 8)
    ids[:, 0] = torch.arange(8) + WORDS - 8  # which sentence it is
    losses = []
    for _ in range(STEPS):
        loss = loss_of(net, ids)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run.end_training()
    return losses[0], statistics.mean(losses[-10:])


@pytest.mark.full  # 15 s of CPU
@pytest.mark.timeout(300)
def test_the_loss_at_the_end_is_that_of_bfloat16() -> None:
    first, wide = learnt("bf16")
    start, narrow = learnt("fp8-torchao")
    assert first > 2
    assert wide < 0.05
    assert abs(start - first) > 1e-5, "float8 is not on"
    assert abs(narrow - wide) <= 1e-3
