"""Groups in words: lines for `accelerator.explain()`, and the warning about a single one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from accel_fsdp.sharding.own_plan import repeated_classes
from accel_fsdp.sharding.wrapping import chosen_blocks

if TYPE_CHECKING:
    from torch import nn

    from accel_fsdp.config import FullyShardedDataParallelPlugin
    from accel_fsdp.sharding.wrapping import Group

__all__ = ["described", "one_group", "weight_bytes"]


def described(model: nn.Module, found: Sequence[Group]) -> list[str]:
    """Return a line for each run of groups of one size, with the bytes of their whole weights.

    found: the groups, of which the last is the model around the others.
    """
    *inner, rest = ((group.name, weight_bytes(group.own_parameters)) for group in found)
    lines = []
    for size, alike in groupby(inner, key=lambda pair: pair[1]):
        names = [name for name, _ in alike]
        last = f" to {names[-1]}, {len(names)} groups" if len(names) > 1 else ""
        lines.append(f"fsdp group {names[0]}{last}: {size:,} bytes{' each' if last else ''}")
    part = "rest" if inner else "whole"
    return [*lines, f"fsdp group of the {part} of {type(model).__name__}: {rest[1]:,} bytes"]


def one_group(model: nn.Module, config: FullyShardedDataParallelPlugin) -> str | None:
    """Return the warning about a model that is one group, though nobody wrote NO_WRAP; else None."""
    names = repeated_classes(model)
    if not names or config.auto_wrap_policy == "NO_WRAP" or chosen_blocks(model, config):
        return None
    size = weight_bytes(model.parameters())
    return (
        f"fsdp: this {type(model).__name__} is one group, and all {size:,} bytes of weights are gathered at"
        f" once. If every rank runs each {' and each '.join(names)} in each forward, set"
        f" fsdp.transformer_cls_names_to_wrap: [{', '.join(names)}]; fsdp.auto_wrap_policy: NO_WRAP keeps one"
        " group without this warning"
    )


def weight_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of whole weights, on the meta device and in parts too."""
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
