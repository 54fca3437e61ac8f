"""The precision by hand, for the kit: the library's layers, under its autocast and torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common.recipe import Float8CurrentScaling


class Padded(te.Linear):
    """Takes any number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        return super().forward(nn.functional.pad(x, (0, 0, 0, -rows % 16)))[:rows]


def convert(model: nn.Module) -> nn.Module:
    for name, layer in list(model.named_children()):
        if isinstance(layer, nn.Linear):
            like = Padded(layer.in_features, layer.out_features)
            like.weight, like.bias = layer.weight, layer.bias
            setattr(model, name, like)
        elif isinstance(layer, nn.LayerNorm):
            norm = te.LayerNorm(layer.normalized_shape)
            norm.weight, norm.bias = layer.weight, layer.bias
            setattr(model, name, norm)
    return model


@contextmanager
def context(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, dtype=torch.bfloat16), te.autocast(recipe=Float8CurrentScaling()):
        yield
