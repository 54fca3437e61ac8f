"""Experiment trackers of a run. A tracker gets values on the ranks on which it logs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from accel_core.contract import hooks
from accel_core.contract.arguments import did_you_mean, quoted
from accel_core.contract.hooks import implements
from accel_core.contract.options import masked
from accel_core.errors import AccelError, ConfigError

if TYPE_CHECKING:
    from accel_core.contract.bound import Implementation
    from accel_core.contract.run import Run

Options = Mapping[str, Mapping[str, Any]]


class GeneralTracker:
    """Base class of a user's own tracker: `Accelerator(log_with=[MyTracker()])`.

    Attributes:
        name: its name in `get_tracker`, `init_kwargs` and `log_kwargs`.
        main_process_only: False: methods are called on every rank.
        project: the project name given to `init_trackers`.
    """

    name: str
    main_process_only = True
    project = ""
    _accel_started = False  # a name that subclasses do not have

    def start(self, **options: Any) -> None:
        """Begin when `init_trackers` is called; `options` are its `init_kwargs` for this tracker."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the configuration given to `init_trackers`."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log these values; `options` are the `log_kwargs` for this tracker."""
        raise AccelError(f"{type(self).__name__} cannot log anything\ngive it a method `log(values, step)`")

    def finish(self) -> None:
        """Close the tracker when the run has ended. Called only after `start`."""

    @implements(hooks.tracking_started)
    def _start(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.project = project
        self.start(**options)
        self._accel_started = True
        self.store_init_configuration(config)

    @implements(hooks.log)
    def _log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        self.log(values, step=step, **options)

    @implements(hooks.run_ended)
    def _end(self) -> None:
        if self._accel_started:
            self._accel_started = False  # another run may have it next
            self.finish()


def split_trackers(
    log_with: str | GeneralTracker | Iterable[str | GeneralTracker] | None,
) -> tuple[list[str] | None, list[GeneralTracker]]:
    """Split `log_with` into names and the user's own trackers.

    The names are None if `log_with` is None or has the user's own trackers only.
    """
    given = [log_with] if isinstance(log_with, str | GeneralTracker) else list(log_with or ())
    own = [tracker for tracker in given if isinstance(tracker, GeneralTracker)]
    names = [name for name in given if not isinstance(name, GeneralTracker)]
    return None if log_with is None or (own and not names) else names, own


class Trackers:
    """The trackers of a run on this rank. If none of them logs on this rank, calls do nothing."""

    def __init__(self, run: Run, names: Sequence[str]) -> None:
        self.run = run
        self.names = tuple(names)
        self.has_finished = False
        silent = run.world.rank != 0 and not self._here("log")
        self._loggers: list[tuple[str, Callable[..., None]]] | None = [] if silent else None
        self._observers: list[Callable[..., None]] = []

    def start(self, project: str, config: Any, options: Options) -> None:
        """Open the project in each tracker of this rank."""
        self.run.require_alive()
        self._require_open()
        self._check(options, "init_kwargs")
        if self._loggers:
            raise AccelError(
                f"init_trackers({project!r}): the trackers of this run have been started already\n"
                "make another Accelerator for another project, config or options"
            )
        settings = masked(dict(config if isinstance(config, Mapping) else vars(config)))
        for hook in self._here("tracking_started"):
            hook.call(project, _read(settings), options.get(hook.plugin, {}))
        loggers = self._here("log")
        self._loggers = [(hook.plugin, hook.call) for hook in loggers if hook.plugin in self.names]
        # Extensions get tensors as they are, without waiting for the device.
        self._observers = [hook.call for hook in loggers if hook.plugin not in self.names]

    def log(self, values: Mapping[str, Any], step: int | None, options: Options) -> None:
        """Hand the values to each tracker of this rank.

        Raises:
            Exception: a tracker refused them; raised after all have been called.
        """
        step = None if step is None else operator.index(step)
        self._require_start()
        for observe in self._observers:
            observe(values, step, {})
        if not self._loggers:
            return  # with no tracker to read them, nothing waits for the device
        if options:
            self._check(options, "log_kwargs")
        if self.run.mark_step is not None:
            self.run.mark_step("host_read")
        read = _read(values)  # once, since reading a tensor waits for the device
        with ExitStack() as calls:  # calls all trackers, even if some raise
            for name, log in reversed(self._loggers):
                calls.callback(log, _read(read), step, options.get(name, {}))

    def finish(self) -> None:
        """Close the trackers, while the run goes on. A second call does nothing.

        Raises:
            Exception: a tracker failed; raised after all have been closed.
        """
        if self.has_finished:
            return
        self.has_finished = True
        with ExitStack() as closing:
            for hook in reversed(self.run.hooks.implementations("run_ended")):
                if hook.plugin in self.names:
                    closing.callback(hook.call)

    def get(self, name: str, *, unwrap: bool) -> Any:
        """Return a tracker or its wrapped object; on ranks without it, an object that ignores calls."""
        self._check([name], "get_tracker")
        self._require_start()
        tracker = self.run.plugins[name]
        if not any(own is tracker for own in self.started):
            return _Silence()
        return getattr(tracker, "tracker", tracker) if unwrap else tracker

    @property
    def started(self) -> list[Any]:
        """The trackers that log on this rank."""
        names = [name for name, _ in self._loggers or ()]
        return [self.run.plugins[name] for name in self.names if name in names]

    def _here(self, hook: str) -> list[Implementation]:
        main, plugins = self.run.world.rank == 0, self.run.plugins
        every = self.run.hooks.implementations(hook)
        return [one for one in every if main or not getattr(plugins[one.plugin], "main_process_only", True)]

    def _require_open(self) -> None:
        if self.has_finished and self.names:
            raise AccelError(
                "the trackers of this run are used after they were finished\n"
                "log before that, or make another Accelerator"
            )

    def _require_start(self) -> None:
        self.run.require_alive()
        self._require_open()
        if self._loggers is None:
            raise AccelError(
                "trackers are used before they were started\n"
                "call accelerator.init_trackers(project_name) first"
            )

    def _check(self, named: Iterable[str], where: str) -> None:
        for name in named:
            if name not in self.names:
                raise ConfigError(
                    f"{where}: this run has no tracker {quoted(name)}{did_you_mean(name, self.names)}\n"
                    f"it has {', '.join(self.names) or 'none'}; name it in Accelerator(log_with=...)"
                )


class _Silence:
    """Replacement of a tracker on a rank on which it does not log: scripts need not check the rank."""

    def __getattr__(self, name: str) -> _Silence:
        if name.startswith("__"):  # Python looks up such names itself, as `copy` does
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Silence:
        return self


def _read(value: Any) -> Any:
    """Return a copy that a tracker may keep, with numbers for tensors of one element.

    Mappings, lists, arrays and tensors are copied, as the program may write to them; other objects are not.
    """
    if isinstance(value, Mapping):
        return {str(key): _read(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_read, value))
    if isinstance(value, Tensor):
        _require_whole(value)
        return value.item() if value.numel() == 1 and not value.is_meta else value.detach().clone()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.copy() if value.ndim else value.tolist()  # None if numpy has masked it
    return value


def _require_whole(value: Tensor) -> None:
    """Raise AccelError for a DTensor of which this rank has a part only: its `item` is the part's value."""
    split: Any = getattr(value, "placements", ())
    ranks = value.device_mesh.shape if split else ()  # type: ignore[attr-defined]
    if any(size > 1 and not each.is_replicate() for each, size in zip(split, ranks, strict=True)):
        raise AccelError(
            f"log: a value is a DTensor, of which this rank has a part: {split}\n"
            "call its full_tensor() on all ranks, and log what that returns"
        )
