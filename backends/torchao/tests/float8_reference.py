"""The precision by hand, for the kit: each linear layer by torchao, under autocast to bfloat16."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from float8_problem import float8_by_hand
from torch import nn


def convert(model: nn.Module) -> nn.Module:
    return float8_by_hand(model, "tensorwise", lambda name: True)


def context(device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype=torch.bfloat16)
