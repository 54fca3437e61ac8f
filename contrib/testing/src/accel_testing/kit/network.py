"""The network and the data of the checks: the kit's, or those of a named module.

A strategy that cannot serve any network brings one that it can serve: a module with `network`, `dataset`
and `forward_loss` in place of those here, and `optimizer` and `MICROBATCHES` where it needs others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from accel_testing.kit.stack import NETWORK

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["CLASSES", "FEATURES", "dataset", "given", "network", "parts"]

FEATURES, CLASSES = 6, 3
MICROBATCHES = 1
"""Parts of a batch for a strategy that owns the schedule."""


class _Given:
    """The names of the module that was named, and of this one where it has none."""

    @property
    def named(self) -> bool:
        """True if a module of the user brings the network."""
        return NETWORK in os.environ

    def __getattr__(self, name: str) -> Any:
        own = sys.modules[__name__]
        module = import_module(os.environ[NETWORK]) if self.named else own
        return getattr(module, name, None) or getattr(own, name)


given = _Given()


def network(seed: int = 0) -> nn.Sequential:
    """Linear, LayerNorm, Tanh, Linear; the same weights each time.

    That of a module also takes `noise`, a probability of dropout, and `larger`, for more weights.
    """
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, CLASSES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def dataset(samples: int) -> TensorDataset:
    """Features (samples, 6) and classes (samples,)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    return TensorDataset(x, y)


def forward_loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, None]:
    """Return the loss of a batch: the mean over its rows."""
    x, y = batch
    return cross_entropy(model(x).float(), y), None


def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """Make SGD. AdamW divides by the gradient's size, and would hide a wrong scale."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def parts(batches: Sequence[Any]) -> list[Any]:
    """Cut each batch into as many equal micro-batches as are needed."""
    count: int = given.MICROBATCHES
    if count == 1:
        return list(batches)
    return [
        tree_map(lambda each, at=at: each[at * len(each) // count : (at + 1) * len(each) // count], batch)
        for batch in batches
        for at in range(count)
    ]
