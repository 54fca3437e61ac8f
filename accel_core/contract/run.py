"""A run as plugins and the lower rooms see it, and the open runs of this process."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from accel_core.contract.unit import UnitRun
from accel_core.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_core.contract.prepared import PreparedObjects
    from accel_core.contract.unit import Unit
    from accel_core.contract.window import Window


class Run(UnitRun, Protocol):
    """Everything that one `Accelerator` owns: config, stack, device, world and units.

    Plugins are built with it: `Plugin(config, run)`.
    """

    prepared: PreparedObjects
    windows: Sequence[Window]
    """Windows of the innermost `accumulate`, or of the one entered last."""
    active_loaders: list[Any]
    """The prepared loaders that are being iterated, the innermost last."""
    registered: list[Any]
    accumulation_steps: int
    group: int
    environment: list[str]
    environment_notes: list[str]
    process: int
    checkpoints: Any
    """The run's checkpoint session: saves, loads, and what one leaves to the next."""

    @property
    def units(self) -> list[Unit]:
        """The units of what is prepared."""

    def make_unit(self, name: str | None, strategy: str | None, made: Sequence[Unit] = ()) -> Unit:
        """Return a unit without objects, its hooks resolved for its strategy."""

    def use_strategy(self, alias: str) -> None:
        """Have later calls of `prepare` that name no strategy use this one."""

    def begin_accumulation(self, accumulation: Any) -> None:
        """Make this the innermost `accumulate`.

        Its windows are in use once all of it is entered.
        """

    def use_windows(self, windows: Sequence[Window]) -> None:
        """Make these the windows used last."""

    def end_accumulation(self, accumulation: Any) -> None:
        """Return to the `accumulate` around this one."""

    def resume(self, run_id: str) -> None:
        """Take over the id of the run whose state was loaded.

        A run that a launcher has named keeps its own id.
        """

    def forget_groups(self) -> None:
        """Drop what holds the process group."""

    def end(self, *, failed: bool = False) -> None:
        """Release units and process group; the run cannot be used afterwards."""


live_runs: weakref.WeakSet[Run] = weakref.WeakSet()


def live() -> list[Run]:
    """Return the runs of this process that have not ended."""
    return list(live_runs)


def current() -> Run:
    """Return the only live run.

    Raises:
        AccelError: there is none, or several.
    """
    runs = live()
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise AccelError("there is no Accelerator yet\nmake one first: accelerator = Accelerator()")
    listed = ", ".join(sorted(str(run.stack) for run in runs))
    raise AccelError(f"there are {len(runs)} live runs ({listed})\nsay which: pass run=accelerator.run")
