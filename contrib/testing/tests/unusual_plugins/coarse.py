"""A precision that autocast does not have, and the same by hand: layers multiply by rounded weights."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from attrs import frozen
from torch import nn
from torch.nn.functional import linear

from accel_core import KwargsHandler, hooks, implements, option


@frozen(kw_only=True)
class CoarseConfig(KwargsHandler):
    """Options of the precision; the kit leaves them out where it trains in another."""

    rounded: bool = option(False, help="Round the weights of linear layers.")


class CoarseLinear(nn.Linear):
    def forward(self, x):
        rounded = self.weight + (self.weight.bfloat16().float() - self.weight).detach()
        return linear(x, rounded, self.bias)


def convert(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CoarseLinear
    return model


def context(device: torch.device):
    return nullcontext()


class Coarse:
    def __init__(self, config, run):
        self.on = config is not None and config.rounded

    @implements(hooks.transform_model)
    def transform_model(self, unit, model, phase):
        return convert(model) if phase == "convert" and self.on else model
