"""The base of all trackers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import accel_core
from accel_compat.state.states import PartialState
from accel_core import hooks, implements


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the decorated method on the main process only, if the tracker asks for it."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "main_process_only", False) or PartialState().is_main_process:
            return function(self, *args, **kwargs)
        return None

    return method


class GeneralTracker(accel_core.GeneralTracker):
    """Base of a program's own tracker.

    A subclass has `name`, `requires_logging_directory` and `tracker`.
    """

    def __init__(self, _blank: bool = False) -> None:
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [f"`{each}`" for each in needed if each not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(  # Accelerate's type
                "The implementation for this tracker class is missing the following required attributes."
                f" Please define them in the class definition: {', '.join(missing)}"
            )

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Do nothing.

        A subclass overrides it. A blank tracker is for processes that do not log.
        """

    @implements(hooks.tracking_started)
    def _start(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.project, self._accel_started = project, True
        self.start(**options)
        if config:  # a tracker is not told of an empty config
            self.store_init_configuration(config)


LIBRARY_TRACKERS: dict[str, type[Any]] = {}
"""Name of a library's tracker -> its class."""
_LOGGING = ("start", "store_init_configuration", "finish")


def library_tracker(cls: type[Any]) -> type[Any]:
    """Decorate a library's tracker: register it, and log on the main process."""
    for name, method in list(vars(cls).items()):
        if name in _LOGGING or (name.startswith("log") and callable(method)):
            setattr(cls, name, on_main_process(method))
    if "name" in vars(cls):
        LIBRARY_TRACKERS[cls.name] = cls
    return cls
