"""Memory limits under which a device map spreads a model evenly over the devices."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from accel_compat.modeling.sizes import compute_module_sizes, get_max_memory, get_module_leaves


def get_balanced_memory(
    model: nn.Module,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: dict[str, str | torch.device] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return a memory limit per device that spreads the model evenly.

    A device gets its part of the model and room for 1.25 blocks. The last one keeps its limit.

    low_zero: leave device 0 as empty as possible.
    """
    limits: dict[Any, Any] = get_max_memory(max_memory)
    count = sum(1 for device, size in limits.items() if size > 0 and _is_accelerator(device))
    if count == 0:
        return limits
    if count == 1:
        low_zero = False
        if max_memory is None:
            first = next((device for device in limits if isinstance(device, int)), None)
            if first is not None:
                limits[first] *= 0.9
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    share = sizes[""] // (count - 1 if low_zero else count) + _room(
        model, sizes, as_list(no_split_module_classes)
    )
    numbers = sorted(device for device, size in limits.items() if isinstance(device, int) and size > 0)
    for number in numbers[:-1]:
        limits[number] = min(limits[0] if low_zero and number == 0 else share, limits[number])
    if low_zero:
        left = sizes[""] - sum(limits[number] for number in range(1, count))
        limits[0] = min(max(0, left), limits[0])
    return limits


def as_list(classes: str | Sequence[str] | None) -> list[str]:
    """Return one class name, several or none, as a list."""
    return [classes] if isinstance(classes, str) else list(classes or ())


def _is_accelerator(device: int | str) -> bool:
    if isinstance(device, int):
        return True
    if device == "disk":
        return False
    kind = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(device).type == ("cuda" if kind is None else kind.type)


def _room(model: nn.Module, sizes: dict[str, int], whole: list[str]) -> int:
    """Return 1.25 times the size of the largest block, or of the mean leaf module.

    The larger one counts. A block is the first module of a class in `whole`.
    """
    blocks: dict[str, int] = {}
    for name, size in sizes.items():
        kind = type(attrgetter(name)(model) if name else model).__name__
        if name and kind in whole:
            blocks.setdefault(kind, size)
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    leaves = get_module_leaves(modules)
    mean = int(sum(modules[name] for name in leaves) / max(len(leaves), 1))
    return int(1.25 * max([mean, *blocks.values()]))
