"""Loggers that know the rank."""

from __future__ import annotations

import os

from accel_core import MultiProcessAdapter
from accel_core import get_logger as _get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger whose calls speak on the main process only, unless told otherwise."""
    return _get_logger(name, log_level or os.environ.get("ACCELERATE_LOG_LEVEL"))
