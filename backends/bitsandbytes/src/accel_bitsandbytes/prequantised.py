"""Checkpoints whose layers are quantised already, by bitsandbytes' own keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve
from torch import nn

from accel_bitsandbytes.choosing import Choice
from accel_bitsandbytes.layers import is_layout
from accel_core import ConfigError

__all__ = ["parts_of", "quantised_names"]

_NESTED = "weight.nested_absmax"


def quantised_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return quantised layer of a checkpoint -> the names of its tensors in it."""
    names = list(names)
    layers = [name.removesuffix(".SCB") for name in names if name.endswith(".SCB")]
    layers += [name.partition(".weight.quant_state.")[0] for name in names if is_layout(name)]
    found: dict[str, list[str]] = {layer: [] for layer in layers}
    for name in names:
        for end, letter in enumerate(name):
            if letter == "." and name[:end] in found:
                found[name[:end]].append(name[end + 1 :])
    return found


def parts_of(choice: Choice, model: nn.Module, config: Any, found: Mapping[str, list[str]]) -> Choice:
    """Return the choice that the checkpoint has made.

    Raises:
        ConfigError: the checkpoint's layers are of another kind than the config's, or not linear layers.
    """
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if odd := [name for name in found if name not in linear]:
        raise ConfigError(
            f"the checkpoint has {odd[0]} quantised, and the {type(model).__name__} has no such layer\n"
            "build the model that was saved"
        )
    kind, wanted = _kind(next(iter(found.values()))), _wanted(config)
    if kind != wanted:
        raise ConfigError(
            f"the checkpoint is quantised as {kind}, and the config asks for {wanted}\n"
            "give the config that it was made with"
        )
    chosen = {name: linear[name] for name in found}
    skipped = {name: why for name, why in choice.skipped.items() if name not in chosen}
    skipped |= {name: "not quantised in the checkpoint" for name in choice.chosen if name not in chosen}
    return evolve(choice, chosen=chosen, skipped=skipped)


def _kind(parts: Iterable[str]) -> str:
    layout = next((part for part in parts if is_layout(f"{part}")), "")
    if not layout:
        return "int8"
    return layout.rpartition("__")[2] + (" with scales quantised too" if _NESTED in parts else "")


def _wanted(config: Any) -> str:
    if config.load_in_8bit:
        return "int8"
    nested = " with scales quantised too" if config.bnb_4bit_use_double_quant else ""
    return f"{config.bnb_4bit_quant_type}{nested}"
