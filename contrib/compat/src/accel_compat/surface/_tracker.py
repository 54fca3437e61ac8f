"""The base of trackers, whoever writes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import accel_core
from accel_core import hooks, implements

from .state import PartialState

__all__ = ["GeneralTracker", "on_main_process"]


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a tracker's method: on the main process only, unless the tracker says otherwise."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "main_process_only", False) or PartialState().is_main_process:
            return function(self, *args, **kwargs)
        return None

    return method


class GeneralTracker(accel_core.GeneralTracker):
    """Base of a tracker of one's own, with `name`, `requires_logging_directory` and `tracker`."""

    def __init__(self, _blank: bool = False) -> None:
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [f"`{each}`" for each in needed if each not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(
                "The implementation for this tracker class is missing the following required attributes."
                f" Please define them in the class definition: {', '.join(missing)}"
            )

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """For subclasses to write; a blank one, of a process that does not log, does nothing."""

    @implements(hooks.tracking_started)
    def _start(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.project, self._started = project, True
        self.start(**options)
        if config:  # that there is none is not told to the tracker
            self.store_init_configuration(config)
