"""A model of what strategies forget: one layer per feature, under its name.

Layers take and give (rows, 6). A strategy may refuse a feature by the name of its layer, or of the optimizer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from accel_testing.kit.network import CLASSES, FEATURES

__all__ = ["LAYERS", "awkward", "awkward_optimizer"]


class Pixels(nn.Conv2d):
    """A convolution whose weight lies in memory with its channels last."""

    def __init__(self) -> None:
        super().__init__(2, 2, (1, 3), padding=(0, 1))
        self.weight.data = self.weight.data.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 2, 1, 3)).reshape(-1, FEATURES)


class Turned(nn.Module):
    """A weight that is the transposed view of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES, FEATURES).t())

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Gain(nn.Module):
    """A weight without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.weight)


class Hollow(nn.Module):
    """A weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum(0)


class Averaging(nn.Module):
    """A buffer that is of what this rank has seen."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return x


class Tally(nn.Module):
    """State of its own, in `state_dict` beside parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}calls"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}calls" in state_dict:
            self.calls = int(state_dict.pop(f"{prefix}calls"))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Journal(nn.Module):
    """State of its own by `get_extra_state`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: Mapping[str, int]) -> None:
        self.calls = state["calls"]


def _square() -> nn.Module:
    return nn.Linear(FEATURES, FEATURES, bias=False)


LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "pixels": Pixels,
    "turned": Turned,
    "gain": Gain,
    "hollow": Hollow,
    "averaging": Averaging,
    "tally": Tally,
    "journal": Journal,
    "tied": _square,
}
"""Feature -> its layer; `tied` has the weight of the first layer."""


def awkward(without: Collection[str] = (), seed: int = 0) -> nn.Module:
    """Return the model without some of its features; the same weights for a seed."""
    layers = OrderedDict({"first": _square()})
    layers.update((name, make()) for name, make in LAYERS.items() if name not in without)
    layers["last"] = nn.Linear(FEATURES, CLASSES)
    if "tied" in layers:
        layers["tied"].weight = layers["first"].weight
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def awkward_optimizer(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    """SGD, with momentum if its state matters. Its steps are as long as gradients."""
    # foreach: torch's default on devices that it knows
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, foreach=True)
