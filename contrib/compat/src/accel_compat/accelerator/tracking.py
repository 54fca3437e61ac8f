"""Tracking by Accelerate's rules: options of absent trackers are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accel_compat.accelerator.preparing import Preparing
from accel_compat.notices import warn_once
from accel_compat.trackers.base import GeneralTracker
from accel_compat.trackers.registry import Registered, resolve_trackers
from accel_compat.unsupported import NotServedError


def _told(name: str) -> Any:
    """Make a method of a list that tells of a change before it happens."""

    def change(self: Listed, *args: Any, **options: Any) -> Any:
        after = list(self)
        given = getattr(after, name)(*args, **options)
        self.tell(after)
        list.__init__(self, after)
        return self if given is after else given

    return change


class Listed(list[Any]):
    """A list whose changes are told: what a program does to it counts."""

    def __init__(self, items: Iterable[Any], tell: Callable[[Iterable[Any]], None]) -> None:
        super().__init__(items)
        self.tell = tell


for _name in ("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"):
    setattr(Listed, _name, _told(_name))
for _name in ("__setitem__", "__delitem__", "__iadd__", "__imul__"):
    setattr(Listed, _name, _told(_name))


Options = Mapping[str, Mapping[str, Any]]


class Tracking(Preparing):
    """An Accelerator's trackers."""

    log_with: list[Any]
    logging_dir: Any
    _asked_trackers: list[Any]
    """`log_with` at the time when the run was made."""
    _assigned_trackers: list[Any] | None = None
    """The trackers, once the program has changed which there are."""

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Options | None = None
    ) -> None:
        """Start all trackers."""
        if self.log_with != self._asked_trackers:
            self._start_assigned(project_name, config or {}, init_kwargs or {})
            return
        super().init_trackers(project_name, config, self._for_mine("init_trackers", init_kwargs))

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Options | None = None
    ) -> None:
        """Log values to each tracker, if there are any."""
        if self._assigned_trackers is not None:
            for tracker in self._assigned_trackers:
                if self.is_main_process or not getattr(tracker, "main_process_only", True):
                    tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))
            return
        if self.run.trackers.names:
            super().log(values, step, self._for_mine("log", log_kwargs) if log_kwargs else None)

    def _for_mine(self, where: str, options: Options | None) -> Options:
        known = self.run.trackers.names
        for name in options or ():
            if name not in known:
                warn_once(f"{where}: the entry for {name!r} is ignored, because log_with does not name it")
        return {name: each for name, each in (options or {}).items() if name in known}

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker, or with `unwrap` what it wraps.

        Where none logs on this rank, a blank one.

        Raises:
            ValueError: there is none of that name, but others.
        """
        for tracker in self._assigned_trackers or ():
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names, logs_here = self.run.trackers.names, self.is_main_process or bool(super().trackers)
        if name not in names and names and logs_here:
            raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`.")
        if name not in names or not logs_here:
            return GeneralTracker(_blank=True)
        made = super().get_tracker(name)
        if isinstance(made, Registered):
            return made.tracker.tracker if unwrap else made.tracker
        return super().get_tracker(name, unwrap)

    def _start_assigned(self, project: str, config: Mapping[str, Any], options: Options) -> None:
        started: list[Any] = []
        for each in resolve_trackers(self.log_with, self.logging_dir):
            if isinstance(each, str):
                raise NotServedError(
                    f"accelerator.log_with: {each!r} is a tracker of a package, chosen when the run is made\n"
                    f"make it Accelerator(log_with={each!r})"
                )
            if self.is_main_process:
                each.project = project
                each.start(**options.get(each.name, {}))
                if config:
                    each.store_init_configuration(config)
                started.append(each.tracker if isinstance(each, Registered) else each)
        self.trackers = started

    @property
    def trackers(self) -> list[Any]:
        """Trackers that log on this rank, after `init_trackers`.

        Programs may assign the attribute, or edit the list.
        """
        if self._assigned_trackers is not None:
            return self._assigned_trackers
        known = [each.tracker if isinstance(each, Registered) else each for each in super().trackers]
        return Listed(known, self._assign_trackers)

    @trackers.setter
    def trackers(self, trackers: Iterable[Any]) -> None:
        self._assign_trackers(trackers)

    def _assign_trackers(self, trackers: Iterable[Any]) -> None:
        self._assigned_trackers = list(trackers)

    def end_training(self) -> None:
        """Finish the trackers. Programs save after it, so the run ends with the process."""
        known = [each.tracker if isinstance(each, Registered) else each for each in super().trackers]
        for tracker in self._assigned_trackers or ():
            if not any(tracker is each for each in known):
                tracker.finish()
        self._assigned_trackers = None
        self.run.checkpoints.wait(None)
        self.run.trackers.finish()
