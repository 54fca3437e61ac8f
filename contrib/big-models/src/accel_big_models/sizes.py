"""Sizes in bytes: of tensors, of memory, and as text."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from accel_big_models.composing import is_composed, leaves_of
from accel_core import ConfigError

__all__ = ["available", "bytes_in", "bytes_of", "text_of"]

_UNITS: Final = " KMGTP"


def bytes_of(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a tensor's elements, or of the parts that it is made of.

    dtype: of floating-point tensors, None for their own.
    """
    if is_composed(tensor):
        return sum(map(bytes_of, leaves_of(tensor)))
    if dtype is not None and tensor.is_floating_point():
        return tensor.numel() * dtype.itemsize
    return tensor.numel() * tensor.element_size()


def bytes_in(size: int | str) -> int:
    """Return a size in bytes, given as a number or as text such as "10GB".

    Raises:
        ConfigError: it is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGTP]?)(i?)B?", str(size), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"memory of {size!r} is not a size\ngive bytes, or text such as '10GB' or '500MiB'")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _UNITS.index(unit.upper() or " "))


def text_of(size: float) -> str:
    """Return a size in bytes as text, such as 1.5 GB."""
    power = 0
    while size >= 1000 and power < len(_UNITS) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.3g} {_UNITS[power]}B".replace("  ", " ")


def available(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device, or in the host's memory.

    Raises:
        ConfigError: torch cannot tell.
    """
    if device.type == "cpu":
        return _available_on_the_host()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        raise ConfigError(
            f"torch cannot tell how much memory of {device} is free\n"
            f"say how much may be used: memory={{'{device}': '8GiB', 'cpu': '16GiB'}}"
        )
    free, _ = module.mem_get_info(device)
    if not hasattr(module, "memory_reserved"):
        return int(free)
    # What torch's allocator has reserved and nothing uses can be used as well.
    return int(free) + int(module.memory_reserved(device)) - int(module.memory_allocated(device))


def _available_on_the_host() -> int:
    """Return what Linux says can be allocated: free pages, and those of cached files."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    told = next((line for line in lines if line.startswith("MemAvailable:")), None)
    if told is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(told.split()[1]) * 1024
