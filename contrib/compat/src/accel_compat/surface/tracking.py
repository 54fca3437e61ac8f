"""Trackers: the base of one's own; those of libraries are plugins of accel-core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accel_compat.refusing import unserved
from accel_core import GeneralTracker, plugin_status

from .state import PartialState
from .utils._enums import LoggerType

__all__ = ["GeneralTracker", "get_available_trackers", "on_main_process"]


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a tracker's method: on the main process only, unless the tracker says otherwise."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "main_process_only", False) or PartialState().is_main_process:
            return function(self, *args, **kwargs)
        return None

    return method


def get_available_trackers() -> list[LoggerType]:
    """Those trackers whose plugin is installed."""
    return [
        kind for kind in LoggerType if kind is not LoggerType.ALL and plugin_status(kind.value) == "available"
    ]


__getattr__ = unserved(__name__)
