"""Trackers: the base of one's own, and a register of them; those of libraries are plugins of accel-core."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import accel_core
from accel_compat.refusing import unserved
from accel_core import hooks, implements, plugin_status

from .state import PartialState
from .utils._enums import LoggerType

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "GeneralTracker",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]


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

    @implements(hooks.tracking_started)
    def _start(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.project, self._started = project, True
        self.start(**options)
        if config:  # that there is none is not told to the tracker
            self.store_init_configuration(config)


_IN_FOLDERS: Final = ("tensorboard", "aim")
LOGGER_TYPE_TO_CLASS: Final[dict[str, type[Any]]] = {}
"""Name -> class that was registered by it. Trackers of libraries are plugins, and not here."""


def register_tracker_class(tracker_class: type[Any]) -> None:
    """Let `log_with` name a tracker of one's own; it is made at `init_trackers`."""
    if not issubclass(tracker_class, GeneralTracker):
        raise ValueError(f"`tracker_class` must be a subclass of `GeneralTracker`, but got {tracker_class}.")
    for attribute in ("name", "requires_logging_directory"):
        if getattr(tracker_class, attribute, None) in (None, ""):
            raise ValueError(f"The tracker class to register must define a `{attribute}` class attribute.")
    name = tracker_class.name
    if name in LOGGER_TYPE_TO_CLASS or name in {kind.value for kind in LoggerType}:
        warnings.warn(
            f"A tracker with the name '{name}' is already registered and will be overwritten by"
            f" {tracker_class}.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


class Registered(GeneralTracker):
    """A registered class until `init_trackers` makes its object, then that."""

    tracker: Any = None

    def __init__(self, made: Callable[..., Any], folder: str | None) -> None:
        self.name, self.main_process_only = made.name, made.main_process_only  # type: ignore[attr-defined]
        self._make, self._folder = made, [] if folder is None else [folder]

    def start(self, **options: Any) -> None:
        """Make it."""
        self.tracker = self._make(self.project, *self._folder, **options)
        self.tracker.start()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Hand it on."""
        self.tracker.store_init_configuration(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Hand it on."""
        self.tracker.log(values, step=step, **options)

    def finish(self) -> None:
        """Hand it on."""
        self.tracker.finish()


def found(asked: Iterable[Any], folder: str | os.PathLike[str] | None) -> Iterator[Any]:
    """What `log_with` holds, with trackers for the names of registered classes.

    Raises:
        ValueError: one needs a folder, and there is none.
    """
    for each in asked:
        made = LOGGER_TYPE_TO_CLASS.get(each) if isinstance(each, str) else None
        needs = each in _IN_FOLDERS if made is None else made.requires_logging_directory
        if needs and folder is None:
            raise ValueError(f"Logging with `{each}` requires a `logging_dir` to be passed in.")
        yield each if made is None else Registered(made, str(folder) if needs else None)


__getattr__ = unserved(__name__)
