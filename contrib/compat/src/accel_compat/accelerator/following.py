"""Windows of models that no `accumulate` names.

In Accelerate there is one window, and the models of `accumulate` only say whose gradients need not be reduced
yet. So optimizers of other models wait for that window's end too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_core import Run, Unit


class Following:
    """The context of `accumulate`, in whose window other units train too.

    accumulation: core's context of the models that are named. units: those that follow it.
    """

    def __init__(self, accumulation: Any, units: Sequence[Unit]) -> None:
        self._accumulation, self._units = accumulation, units

    def __enter__(self) -> None:
        self._accumulation.__enter__()
        try:
            self._follow(self._accumulation.run)
        except BaseException:  # Ctrl-C too: this micro-batch was not entered
            self._accumulation.drop()
            raise

    def _follow(self, run: Run) -> None:
        led = run.window
        for unit in self._units:
            window: Any = unit.window  # an AccelerateWindow
            window.mark_last(led.index == 0)  # so that `enter` begins a new window where that one is new
            window.enter(led.boundary)
            window.move_to(led.index)
            window.mark_last(led.boundary)
        self._accumulation.extra_units = self._units
        run.windows = [*(unit.window for unit in self._units), *self._accumulation.windows]

    def __exit__(self, *error: object) -> None:
        self._accumulation.extra_units = ()
        for unit in self._units:
            unit.window.leave()
        self._accumulation.__exit__(*error)


class Followers:
    """Units that train in windows of others, as no `accumulate` has named them."""

    def __init__(self) -> None:
        self._named: list[Unit] = []
        self.units: tuple[Unit, ...] = ()

    def name(self, run: Run, models: Sequence[Any]) -> None:
        """Have the units of these models count for themselves from now on."""
        named = [run.prepared.unit_of_model(model) for model in models]
        for unit in self.units:
            if unit in named:
                unit.window.begin_anew()
        self._named = [unit for unit in run.units if unit in self._named or unit in named]
        self.units = tuple(unit for unit in run.units if unit.optimizers and unit not in self._named)
