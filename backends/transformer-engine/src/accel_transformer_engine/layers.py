"""Selection of the layers to convert, with a reason for each other linear layer and norm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from accel_transformer_engine.config import TransformerEngineConfig

__all__ = ["Choice", "choose"]

NORMS = (nn.LayerNorm, nn.RMSNorm)


@frozen
class Choice:
    """The linear layers and norms of a model, divided into layers to convert and layers that stay."""

    chosen: Mapping[str, nn.Module]
    """Name -> layer to convert."""
    skipped: Mapping[str, str]
    """Name of a layer that stays -> the reason."""


def choose(model: nn.Module, config: TransformerEngineConfig) -> Choice:
    """Return the layers to convert under the options; the model is not changed."""
    chosen: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, (nn.Linear, *NORMS)):
            continue
        if reason := _reason_of_layer(layer) or _reason_of_options(config, layer, name):
            skipped[name] = reason
        else:
            chosen[name] = layer
    return Choice(chosen, skipped)


def _reason_of_layer(layer: nn.Module) -> str:
    """Return the reason why this layer cannot be converted, or an empty string."""
    if type(layer) not in (nn.Linear, *NORMS):
        return f"a {type(layer).__name__}, whose own forward would be lost"
    if "forward" in vars(layer):
        return "its forward was replaced on this instance"
    if "weight" not in layer._parameters:
        return "its weight is computed by a hook"
    weight = layer._parameters["weight"]
    if weight is None:
        return "it has no weight"
    if is_traceable_wrapper_subclass(weight):
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    return _reason_of_norm(layer) if isinstance(layer, NORMS) else _reason_of_linear(layer)


def _reason_of_linear(layer: nn.Module) -> str:
    assert isinstance(layer, nn.Linear)
    if layer.in_features % 16 or layer.out_features % 16:
        return f"{layer.in_features} to {layer.out_features} features, not multiples of 16"
    return ""


def _reason_of_norm(layer: nn.Module) -> str:
    if isinstance(layer, nn.LayerNorm) and layer.bias is None:
        return "it has no bias"
    if layer.eps is None:
        return "its eps depends on the dtype of its input"
    return ""


def _reason_of_options(config: TransformerEngineConfig, layer: nn.Module, name: str) -> str:
    """Return the option that leaves this layer out, or an empty string."""
    if config.only is not None and not re.fullmatch(config.only, name):
        return "its name does not match `only`"
    if config.skip is not None and re.fullmatch(config.skip, name):
        return "its name matches `skip`"
    if isinstance(layer, NORMS) and not config.norms:
        return "norms are left out (norms)"
    if config.filter is not None and not config.filter(layer, name):
        return "the filter refuses it"
    return ""
