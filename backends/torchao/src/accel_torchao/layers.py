"""Selection of the linear layers that compute in float8, with a reason for each other layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from accel_torchao.config import Float8Config

__all__ = ["Choice", "choose"]


@frozen
class Choice:
    """The linear layers of a model, divided into layers to convert and layers that stay."""

    chosen: Mapping[str, nn.Linear]
    """Name -> layer to convert."""
    skipped: Mapping[str, str]
    """Name of a layer that stays -> the reason."""


def choose(model: nn.Module, config: Float8Config) -> Choice:
    """Return the layers to convert under the options; the model is not changed."""
    named = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    ends = () if config.first_and_last else (next(iter(named), None), next(reversed(named), None))
    chosen: dict[str, nn.Linear] = {}
    skipped: dict[str, str] = {}
    for name, layer in named.items():
        at_end = "the first or last linear layer (first_and_last)" if name in ends else ""
        reason = _reason_of_layer(layer) or _reason_of_options(config, layer, name) or at_end
        if reason:
            skipped[name] = reason
        else:
            chosen[name] = layer
    return Choice(chosen, skipped)


def _reason_of_layer(layer: nn.Linear) -> str:
    """Return the reason why this layer cannot be converted, or an empty string."""
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__name__}, whose own forward would be lost"
    if "forward" in vars(layer):
        return "its forward was replaced on this instance"
    if "weight" not in layer._parameters:
        return "its weight is computed by a hook"
    if is_traceable_wrapper_subclass(layer.weight):
        return f"its weight is a {type(layer.weight).__name__}"
    if not layer.weight.is_floating_point():
        return f"its weight is {layer.weight.dtype}"
    return ""


def _reason_of_options(config: Float8Config, layer: nn.Linear, name: str) -> str:
    """Return the option that leaves this layer out, or an empty string."""
    features = (layer.in_features, layer.out_features)
    shape = f"{layer.in_features} to {layer.out_features} features"
    if config.only is not None and not re.fullmatch(config.only, name):
        return "its name does not match `only`"
    if config.skip is not None and re.fullmatch(config.skip, name):
        return "its name matches `skip`"
    if min(features) < config.min_features:
        return f"{shape}, less than min_features {config.min_features}"
    if any(size % config.multiple_of for size in features):
        return f"{shape}, not multiples of {config.multiple_of} (multiple_of)"
    if config.filter is not None and not config.filter(layer, name):
        return "the filter refuses it"
    return ""
