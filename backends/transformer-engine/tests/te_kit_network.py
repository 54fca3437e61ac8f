"""A network whose features Transformer Engine can multiply, for the kit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def network(seed: int = 0, noise: float = 0.0, larger: bool = False) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    dropout = [nn.Dropout(noise)] if noise else []
    more = [nn.Linear(16, 16)] if larger else []
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(), *dropout, nn.Linear(16, 16), *more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def dataset(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 16, generator=generator)
    y = torch.randint(0, 16, (samples,), generator=generator)
    return TensorDataset(x, y)


def forward_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y), None
