"""Experts of which each rank has a part.

Numbered over all ranks, as in a model that has them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn

    from accel_core import Unit

__all__ = ["elsewhere", "rename", "spread"]


def spread(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of DeepSpeed's MoE layers whose experts are on several ranks."""
    for name, module in model.named_modules():
        if getattr(module, "ep_size", 1) > 1 and hasattr(module, "experts"):
            yield name, module


def _numbered(layer: Any, name: str) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield (number here, global name, a parameter like it) per expert parameter."""
    mine = list(layer.experts.deepspeed_experts)
    first = dist.get_rank(layer.ep_group) * len(mine)
    for number in range(layer.ep_size * len(mine)):
        for part, parameter in mine[number % len(mine)].named_parameters():
            here = number - first if first <= number < first + len(mine) else None
            path = f"{name}.experts.deepspeed_experts"
            yield ("" if here is None else f"{path}.{here}.{part}"), f"{path}.{number}.{part}", parameter


def rename(unit: Unit) -> None:
    """Have the state of this rank's experts named by their numbers over all ranks."""
    (model,) = unit.models
    for path, layer in spread(model):
        names = {here: name for here, name, _ in _numbered(layer, path) if here}
        unit.names.rename(0, names)


def elsewhere(unit: Unit) -> dict[str, nn.Parameter]:
    """Name -> a parameter of the same shape, for the experts that other ranks have."""
    layers = [each for model in unit.models for each in spread(model)]
    numbered = [each for path, layer in layers for each in _numbered(layer, path)]
    return {name: parameter for here, name, parameter in numbered if not here}
