"""The older home of `utils.memory`."""

from __future__ import annotations

import warnings

from .utils.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]

warnings.warn(
    "memory_utils has been reorganized to utils.memory; use `from accelerate import"
    " find_executable_batch_size`",
    FutureWarning,
    stacklevel=2,
)
