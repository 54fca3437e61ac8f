"""Tensors and JSON on a disk or in a bucket: whole or absent, verified, readable under any split.

This package does not know runs, units or the Accelerator. `functions` has the public functions; `protocols`
has the interfaces that a place and a group of ranks implement; docs/checkpoint-format.md describes the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core.storage.functions import async_save, load, save, verify

__all__ = ["async_save", "load", "save", "verify"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from accel_core.storage import functions  # late: opening a checkpoint needs no torch

    return getattr(functions, name)
