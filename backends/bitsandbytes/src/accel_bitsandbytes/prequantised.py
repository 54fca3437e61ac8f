"""Checkpoints whose layers are already quantised, under bitsandbytes' keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve
from torch import nn

from accel_bitsandbytes.choosing import Choice
from accel_bitsandbytes.layers import is_layout
from accel_core import ConfigError

__all__ = ["choose_prequantised", "quantised_names"]

_NESTED = "weight.nested_absmax"


def quantised_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the quantised layers of a checkpoint: name -> names of its tensors, relative to the layer."""
    names = list(names)
    layers = [name.removesuffix(".SCB") for name in names if name.endswith(".SCB")]
    layers += [name.partition(".weight.quant_state.")[0] for name in names if is_layout(name)]
    tensors: dict[str, list[str]] = {layer: [] for layer in layers}
    for name in names:
        # A tensor's name has further dots after the layer's name, so each prefix is tried.
        for end, letter in enumerate(name):
            if letter == "." and name[:end] in tensors:
                tensors[name[:end]].append(name[end + 1 :])
    return tensors


def choose_prequantised(
    choice: Choice, model: nn.Module, config: Any, prequantised: Mapping[str, list[str]]
) -> Choice:
    """Return the choice of layers that are quantised in the checkpoint.

    Raises:
        ConfigError: the checkpoint's kind of quantisation differs from the config's, or a layer is not
            linear.
    """
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if unknown := [name for name in prequantised if name not in linear]:
        raise ConfigError(
            f"the checkpoint has a quantised {unknown[0]}, but the {type(model).__name__} has no such layer\n"
            "build the model that was saved"
        )
    kind, wanted = _kind(next(iter(prequantised.values()))), _kind_of_config(config)
    if kind != wanted:
        raise ConfigError(
            f"the checkpoint is quantised as {kind}, but the config says {wanted}\n"
            "use the config with which the checkpoint was made"
        )
    chosen = {name: linear[name] for name in prequantised}
    skipped = {name: why for name, why in choice.skipped.items() if name not in chosen}
    skipped |= {name: "not quantised in the checkpoint" for name in choice.chosen if name not in chosen}
    return evolve(choice, chosen=chosen, skipped=skipped)


def _kind(parts: Iterable[str]) -> str:
    layout = next((part for part in parts if is_layout(f"{part}")), "")
    if not layout:
        return "int8"
    return layout.rpartition("__")[2] + (" with scales quantised too" if _NESTED in parts else "")


def _kind_of_config(config: Any) -> str:
    if config.load_in_8bit:
        return "int8"
    nested = " with scales quantised too" if config.bnb_4bit_use_double_quant else ""
    return f"{config.bnb_4bit_quant_type}{nested}"
