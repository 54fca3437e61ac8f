"""The context of `accumulate`: one micro-batch of the windows of some units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from typing import TYPE_CHECKING, Any

from accel_core.distributed.logging import get_logger
from accel_core.errors import AccelError

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit
    from accel_core.contract.window import WindowSize
    from accel_core.data.loader import PreparedLoader


class Accumulation:
    """The context of `accumulate(*models)`: one micro-batch in the windows of the models' units.

    A program makes the context once per set of models and enters it for each micro-batch. Contexts of
    different units nest.

    Attributes:
        models: the models that `accumulate` was called with; empty stands for all models of the run.
        units: the units of these models.
        trained: the units that have optimizers; all units if no unit has an optimizer.
        windows: the windows of the units.
        outer: the accumulation around this one.
        window_size: the size that `windows` knows in advance. None: the configured size, and the loader's
            last batch ends the window.
        last: whether this micro-batch is the last of a window whose `window_size` is known.
        batch: the batch to pass to `step_context`. None: no step context is entered.
        extra_units: other units whose gradients a loss inside may reach.

    Raises:
        AccelError: the run has ended, or has not prepared a model. Entering the context raises it too.
    """

    def __init__(self, run: Run, models: Sequence[nn.Module]) -> None:
        self.run, self.models = run, models
        self.outer: Accumulation | None = None
        self.window_size: WindowSize | None = None
        self.last = False
        self.batch: Any = None
        self.extra_units: Sequence[Unit] = ()
        self._ended_in: object = None
        """(id of the loader, number of its batch) of the last entry that a loader's last batch made final."""
        self._contexts: ExitStack | None = None
        self._no_sync: ExitStack | None = None
        self._find_units()

    def _find_units(self) -> None:
        run = self.run
        run.require_alive()
        found_with = run.prepared.trained
        self.units = units = tuple(units_of(run, self.models) if self.models else run.units)
        self.trained = tuple(unit for unit in units if unit.optimizers) or units
        self.windows = tuple(unit.window for unit in units)
        options = run.config.accumulation
        self._ends_with_loader = options.sync_with_dataloader
        self._reducing = () if options.sync_each_batch else tuple(_reducing(run, units, self.models))
        self._surrounded = tuple(unit for unit in units if unit.steps.step_context is not None)
        simple = len(self.windows) == 1 and not self._reducing and not self._surrounded
        self._only_window = self.windows[0] if simple else None
        self._found_with = found_with  # last: Ctrl-C may come before

    def for_batch(
        self, batch: Any, window_size: WindowSize | None = None, *, last: bool = False
    ) -> Accumulation:
        """Return a context of the same models for one micro-batch of a window of known size."""
        made = copy(self)
        made.outer = made._contexts = made._no_sync = None
        made.batch, made.window_size, made.last = batch, window_size, last
        return made

    def __enter__(self) -> None:
        run = self.run
        if run.prepared.trained is not self._found_with:  # the program has prepared or freed objects since
            self._find_units()
        outer = run.accumulation
        if outer is not None:
            self._refuse_nesting(outer)
        last = self.last
        if self.window_size is None:
            active, last = run.active_loaders, False
            if active and self._ends_with_loader:
                loader = active[-1] if len(active) == 1 else _loader_of(active, self.batch)
                last = loader.last
                if last:
                    self._note_end(loader)
        self.outer = outer
        run.accumulation = self
        window, windows = self._only_window, self.windows
        try:
            if window is not None:
                window.enter(last, self.window_size)
            else:
                self._enter_all(last)
            if run.windows is not windows and windows:
                run.windows = windows
        except BaseException:  # a plugin may raise anything, and Ctrl-C may come: undo the entry
            self.drop()
            raise

    def _note_end(self, loader: Any) -> None:
        """Warn once if the loader's last batch has several micro-batches: each one ends its window."""
        place = id(loader), loader.place
        if place == self._ended_in and any(window.size > 1 for window in self.windows):
            get_logger(__name__).warning_once(
                "accumulate was entered twice for a loader's last batch, which ends the window each time; for"
                " parts of batches, take accelerator.windows(parts, model, size=...)"
            )
        self._ended_in = place

    def _refuse_nesting(self, entered: Accumulation | None) -> None:
        """Refuse a second accumulation of the same units."""
        while entered is not None:
            if not set(entered.units).isdisjoint(self.units):
                raise AccelError(
                    "accumulate, or windows, inside that of the same models: one micro-batch would count as"
                    " two\n"
                    "enter it once per micro-batch; `for batch in window` does so by itself"
                )
            entered = entered.outer

    def _enter_all(self, last: bool) -> None:
        before = [window.snapshot() for window in self.windows]
        try:
            for window in self.windows:
                window.enter(last, self.window_size)
            if self._reducing or self._surrounded:
                self._surround()
        except BaseException:
            for window, state in zip(self.windows, before, strict=True):
                window.restore(state)
            raise

    def _surround(self) -> None:
        self._end_contexts()  # Ctrl-C may have left contexts entered
        self.follow_windows()
        if self._surrounded and self.batch is not None:
            self._contexts = contexts = ExitStack()
            for unit in self._surrounded:
                contexts.enter_context(unit.steps.step_context(unit, self.batch))

    def follow_windows(self) -> None:
        """Have each unit reduce gradients only if this micro-batch is its window's last."""
        self._end_no_sync()
        for unit, models in self._reducing:
            if not unit.window.boundary:
                self._no_sync = self._no_sync or ExitStack()
                self._no_sync.enter_context(unit.steps.no_sync(unit, models))

    # Drop each ExitStack only after it has closed: Ctrl-C may arrive in between.

    def _end_no_sync(self) -> None:
        if self._no_sync is not None:
            self._no_sync.close()
            self._no_sync = None

    def _end_contexts(self, *error: Any) -> None:
        try:
            if self._contexts is not None:
                self._contexts.__exit__(*error or (None, None, None))
                self._contexts = None
        finally:
            self._end_no_sync()

    def _leave_all(self, *error: Any) -> None:
        try:
            for window in self.windows:
                window.leave()
        finally:
            self._end_contexts(*error)

    def drop(self) -> None:
        """Close the contexts without passing an error to them, and return to the outer accumulation."""
        try:
            self._end_contexts()
        finally:
            self._return_to_outer()

    def _return_to_outer(self) -> None:
        self.run.accumulation = outer = self.outer
        if outer is not None:
            self.run.windows = outer.windows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            window = self._only_window
            if window is None:
                self._leave_all(kind, error, trace)
            elif window.awaits_backward:
                window.leave()
        except BaseException:  # Ctrl-C may come before all contexts have ended
            self._end_contexts(kind, error, trace)
            raise
        finally:  # last: until then, a later accumulation can still end these contexts
            self._return_to_outer()


def _loader_of(active: Sequence[PreparedLoader], batch: Any) -> PreparedLoader:
    """Return the loader that handed out `batch`; if none did, the loader of the innermost loop.

    A loader that the program reads by turns with the loader of a surrounding loop counts only for its own
    batches.
    """
    if batch is not None:
        for loader in active:
            if loader.hands_out(batch):
                return loader
    return next((loader for loader in reversed(active) if not loader.is_held), active[-1])


def units_of(run: Run, models: Iterable[nn.Module]) -> list[Unit]:
    """Return the units of these models.

    Raises:
        AccelError: the run has not prepared a model.
    """
    units: list[Unit] = []
    for model in models:
        unit = run.prepared.unit_of_model(model)
        if unit is None:
            run.require_alive()
            raise AccelError(
                f"this run has not prepared the {type(model).__name__} it was given\n"
                "prepare it first, and use what accelerator.prepare(...) returns"
            )
        if unit not in units:
            units.append(unit)
    return units


def _reducing(
    run: Run, units: Sequence[Unit], models: Sequence[nn.Module]
) -> list[tuple[Unit, list[nn.Module]]]:
    """Return the units whose strategies reduce in each backward, with their wrapped models among `models`."""
    places = [place for model in models if (place := run.prepared.place_of(model)) is not None]
    return [
        (unit, [unit.wrapped[number] for owner, number in places if owner is unit] or unit.wrapped)
        for unit in units
        if unit.steps.no_sync is not None
    ]
