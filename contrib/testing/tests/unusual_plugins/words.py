"""A network that `narrow` can serve."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

MICROBATCHES = 2  # what each batch is cut into for forward_backward; left out: 1


class Words(nn.Module):
    def __init__(self, layers: int, noise: float) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.noise = nn.Dropout(noise)

    def forward(self, ids):
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = hidden + self.noise(torch.tanh(layer(hidden)))
        return hidden @ self.words.weight.T


def network(seed: int = 0, *, noise: float = 0.0, larger: bool = False) -> nn.Module:
    """The same weights for a seed; `noise` is for level 4, and `larger` is the same with more weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Words(layers=3 if larger else 2, noise=noise)


def dataset(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*torch.randint(11, (2, samples, 5), generator=generator))


def forward_loss(model, batch):
    ids, following = batch
    return cross_entropy(model(ids).float().flatten(0, 1), following.flatten()), None


def optimizer(parameters, lr):  # left out: SGD; AdamW's own eps would hide an error that scales gradients
    return torch.optim.AdamW(parameters, lr=lr, eps=1.0)
