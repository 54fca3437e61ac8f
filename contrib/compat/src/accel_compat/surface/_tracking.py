"""`log` and its kin, by Accelerate's rules: what is for a tracker that is not there is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_compat.saying import say_once

from ._preparing import Preparing
from .tracking import GeneralTracker, Registered

Options = Mapping[str, Mapping[str, Any]]


class Tracking(Preparing):
    """An Accelerator's trackers."""

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Options | None = None
    ) -> None:
        """Start all trackers."""
        super().init_trackers(project_name, config, self._for_mine("init_trackers", init_kwargs))

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Options | None = None
    ) -> None:
        """Log values to each tracker, if there are any."""
        if self.run.trackers.names:
            super().log(values, step, self._for_mine("log", log_kwargs) if log_kwargs else None)

    def _for_mine(self, where: str, options: Options | None) -> Options:
        known = self.run.trackers.names
        for name in options or ():
            if name not in known:
                say_once(f"{where}: what is for {name!r} is left out, because log_with does not name it")
        return {name: each for name, each in (options or {}).items() if name in known}

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker, or with `unwrap` what it wraps.

        Raises:
            ValueError: there is none of that name, but others.
        """
        names = self.run.trackers.names
        if name not in names:
            if not names or not self.is_main_process:
                return GeneralTracker(_blank=True)
            raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`.")
        made = super().get_tracker(name)
        if isinstance(made, Registered):
            return made.tracker.tracker if unwrap else made.tracker
        return super().get_tracker(name, unwrap)

    @property
    def trackers(self) -> list[Any]:
        """The trackers that log on this rank; none before `init_trackers`."""
        return [each.tracker if isinstance(each, Registered) else each for each in super().trackers]
