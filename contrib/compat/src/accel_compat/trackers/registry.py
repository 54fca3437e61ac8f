"""Trackers: the libraries' own, the base of one's own, and the register of both."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

import accel_compat.trackers.libraries
import accel_compat.trackers.tensorboard  # noqa: F401  their classes register themselves
from accel_compat.configs.enums import LoggerType
from accel_compat.environment import libraries as imports
from accel_compat.trackers.base import LIBRARY_TRACKERS, GeneralTracker
from accel_core import AccelError, plugin_status

LOGGER_TYPE_TO_CLASS: Final[dict[str, type[Any]]] = dict(LIBRARY_TRACKERS)
"""Names for `log_with` -> classes. `register_tracker_class` adds to them."""


def get_available_trackers() -> list[LoggerType]:
    """List the trackers whose library is installed."""
    order = "tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio"
    return [LoggerType(name) for name in order if getattr(imports, f"is_{name}_available")()]


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None
) -> list[LoggerType | str | GeneralTracker]:
    """Return each tracker of `log_with` once, without libraries that are missing.

    Raises:
        ValueError: a name is unknown, or a tracker needs a folder and there is none.
    """
    several = log_with if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
    if any(_word(each) == "all" for each in several):
        return [*(each for each in several if isinstance(each, GeneralTracker)), *get_available_trackers()]
    kept: list[LoggerType | str | GeneralTracker] = []
    for each in several:
        asked = each if isinstance(each, GeneralTracker) else _known(each)
        missing = isinstance(asked, LoggerType) and asked not in get_available_trackers()
        if missing or asked in kept:
            continue
        if not isinstance(asked, GeneralTracker):
            _require_folder(_word(asked), logging_dir)
        kept.append(asked)
    return kept


def _known(asked: Any) -> LoggerType | str:
    word = _word(asked)
    if word not in LOGGER_TYPE_TO_CLASS:
        known = [kind.value for kind in LoggerType]
        raise ValueError(f"Unsupported logging capability: {asked}. Choose between {known}")
    return LoggerType(word) if word in LoggerType.list() else word


def _needs_folder(asked: Any) -> bool:
    return _is_word(asked) and bool(LOGGER_TYPE_TO_CLASS[_word(asked)].requires_logging_directory)


def _require_folder(word: str, folder: Any) -> None:
    if _needs_folder(word) and folder is None:
        raise ValueError(f"Logging with `{word}` requires a `logging_dir` to be passed in.")


def _word(asked: Any) -> str:
    return str(getattr(asked, "value", asked))


def register_tracker_class(tracker_class: type[Any]) -> None:
    """Let `log_with` name a tracker of one's own; it is made at `init_trackers`."""
    if not issubclass(tracker_class, GeneralTracker):
        raise ValueError(f"`tracker_class` must be a subclass of `GeneralTracker`, but got {tracker_class}.")
    for attribute in ("name", "requires_logging_directory"):
        if getattr(tracker_class, attribute, None) in (None, ""):
            raise ValueError(f"The tracker class to register must define a `{attribute}` class attribute.")
    name = tracker_class.name
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"A tracker with the name '{name}' is already registered and will be overwritten by"
            f" {tracker_class}.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


class Registered(GeneralTracker):
    """A registered class until `init_trackers` makes its object, then that.

    As there, trackers are started on the main process only, even where their methods serve every rank.
    """

    tracker: Any = None

    def __init__(self, made: Callable[..., Any], folder: str | None) -> None:
        self.name = made.name  # type: ignore[attr-defined]
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


class OnMainProcess(Registered):
    """A tracker of the program's own, whose methods serve every rank."""

    def __init__(self, tracker: GeneralTracker) -> None:
        self.name, self._waiting = tracker.name, tracker

    def start(self, **options: Any) -> None:
        """Start it."""
        self.tracker, self._waiting.project = self._waiting, self.project
        self.tracker.start(**options)


def resolve_trackers(asked: Iterable[Any], folder: str | os.PathLike[str] | None) -> Iterator[Any]:
    """Give `log_with` with trackers for names of classes; names of plugins stay.

    Raises:
        ValueError: one needs a folder, and there is none.
        AccelError: its library is not installed.
    """
    several = list(asked)
    if any(_is_word(each) and _word(each) == "all" for each in several):
        several = [each for each in filter_trackers(several) if folder is not None or not _needs_folder(each)]
    words = dict.fromkeys(_word(each) if _is_word(each) else each for each in several)
    for each in words:
        if isinstance(each, str):
            yield _named(each, folder)
        else:
            serves_all = isinstance(each, GeneralTracker) and not each.main_process_only
            yield OnMainProcess(each) if serves_all else each


def _named(word: str, folder: Any) -> str | Registered:
    made = LOGGER_TYPE_TO_CLASS.get(word)
    if made is None:
        if plugin_status(word) == "missing":
            known = [kind.value for kind in LoggerType]
            raise ValueError(f"Unsupported logging capability: {word}. Choose between {known}")
        return word
    _require_folder(word, folder)
    if made not in LIBRARY_TRACKERS.values() or LoggerType(word) in get_available_trackers():
        return Registered(made, str(folder) if made.requires_logging_directory else None)
    if plugin_status(word) == "available":
        return word
    raise AccelError(f"log_with: {word} is not installed\npip install {word.replace('_', '-')}")


def _is_word(tracker: Any) -> bool:
    return isinstance(tracker, (str, Enum))
