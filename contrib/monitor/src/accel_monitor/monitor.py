"""The extension `monitor`: it follows a run by public hooks, and writes its record."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel_core import AccelError, hooks, implements
from accel_monitor.hangs import Watch
from accel_monitor.pace import Pace
from accel_monitor.record import RecordFile
from accel_monitor.sampling import BEGUN, WAITS, Reads, Sampler
from accel_monitor.utilization import utilization

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import Run, RunConfig, Unit
    from accel_monitor.config import MonitorConfig

__all__ = ["Monitor"]

RATES = ("seconds", "samples_per_second", "items_per_second")

M = TypeVar("M", bound=Callable[..., Any])


def _harmless(method: M) -> M:
    """Make a method end the record where it fails, and do nothing without a record."""

    @wraps(method)
    def call(self: Monitor, *arguments: Any) -> None:
        if self.sampler is not None:
            try:
                method(self, *arguments)
            except Exception as error:  # no error of the record may end the training
                self.fail(error)

    return call  # type: ignore[return-value]


class Monitor:
    """Follow a run.

    A run with a local project folder has a record: the main process writes it, and every rank takes samples
    for its pace. An error ends the record with one warning, and never the training.
    sampler: None where there is no record, or none any more.
    """

    def __init__(self, config: MonitorConfig, run: Run) -> None:
        self.config, self.run = config, run
        self.sampler: Sampler | None = None
        self.latest: dict[str, Any] = {}
        """The values of the last sample, and the last memory."""
        self._is_asked = False
        self._pace: Pace | None = None
        self._watch: Watch | None = None
        self._saved_at: tuple[int, float] | None = None

    @implements(hooks.run_started)
    def run_started(self, run_id: str, config: RunConfig) -> None:
        folder = config.project.project_dir
        if self.config.every and folder is not None and "://" not in folder:
            self._is_asked = True
            self.sampler = Sampler(self.run, self.config.every, self._sample, self.fail)
            self._file = RecordFile(self.run, folder)
            if self.run.world.size > 1:
                self._pace = Pace(self.run.world)
        if self.run.world.size > 1:
            self._watch = Watch.of(self.run)
            self._leave_watch = self._watch.add(self.run, None if self._pace is None else self._pace.publish)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_leave, weakref.ref(self)))

    def fail(self, error: Exception) -> None:
        """End the record, with a warning."""
        if self.sampler is not None:
            self.sampler.marks = None  # loops that are under way still have it
            self.sampler, self.latest = None, {}
            self._file.close()
            text = f"the run's record ends, and training goes on: {type(error).__name__}: {error}"
            warnings.warn(text, stacklevel=2)

    def close_record(self) -> None:
        """Close the record's file."""
        self._file.close()

    # -- a step -----------------------------------------------------------------------------------

    @implements(hooks.after_step)
    def after_step(self, unit: Unit, optimizer: Optimizer, applied: bool) -> None:
        sampler = self.sampler
        if sampler is None:
            return
        if optimizer is sampler.counted:
            sampler.count += 1
            if sampler.marks is None and sampler.count != sampler.next:
                return
        elif sampler.marks is None and sampler.counted is not None:
            return
        try:
            sampler.turn(unit, optimizer, applied)
        except Exception as error:  # no error of the record may end the training
            self.fail(error)

    @implements(hooks.collective)
    def collective(self, operation: str, ended: bool) -> None:
        if self._watch is not None and operation in BEGUN and not ended:
            self._watch.backwards += 1
        if self.sampler is not None and self.sampler.marks is not None:
            part = operation if operation in BEGUN else WAITS
            self.sampler.mark(part if ended else BEGUN.get(operation, ""))

    @implements(hooks.read_batches)
    def read_batches(self, batches: Iterator[Any], loader: Any, done: int) -> Iterator[Any]:
        return batches if self.sampler is None else Reads(batches, loader, done, self.sampler)

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        if self.sampler is not None:
            self.sampler.forget(unit)

    # -- what the program does beside -------------------------------------------------------------

    @implements(hooks.tracking_started)
    @_harmless
    def tracking_started(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._write("settings", early=True, project=project, values=config)

    @implements(hooks.log)
    @_harmless
    def log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        sampler = self._sampling
        copied, done = _nested(values, sampler.copied), sampler.count
        sampler.when_copied(lambda: self._write("log", step=done, given=step, values=copied))

    @implements(hooks.noted)
    @_harmless
    def noted(self, kind: str, text: str) -> None:
        name = "path" if kind == "profile" else "text"
        self._write(kind, early=True, step=self._sampling.count, **{name: text})

    def state_dict(self) -> Mapping[str, Any]:
        if self.sampler is None:
            return {}
        self._saved_at = self.sampler.count, time.perf_counter()
        self.sampler.mark("other")
        return {"name": self._file.name, "step": self.sampler.count}

    @_harmless
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        step = int(state["step"])
        self._sampling.move_to(step)
        if self._file.is_open:
            self._write("restart", step=step)
        else:
            self._file.go_on(state["name"], step)

    @implements(hooks.checkpoint_committed)
    @_harmless
    def checkpoint_committed(self, folder: Path | str, step: int | None) -> None:
        begun, since = self._saved_at or (-1, 0.0)
        waited = begun == self._sampling.count  # else it was written while training went on
        if waited:
            self._sampling.mark("checkpoint")
        seconds = round(time.perf_counter() - since, 6) if waited else None
        self._write("checkpoint", step=begun, folder=str(folder), seconds=seconds)

    @implements(hooks.run_ended)
    def run_ended(self) -> None:
        self._end_record()
        if self._pace is not None:
            self._pace.ended = True
        if self._watch is not None:
            self._leave_watch()

    @_harmless
    def _end_record(self) -> None:
        if not self._file.is_closed:  # with a run that the program dropped: Python has collected the file
            self._sampling.end()
            self._write("end", early=True, step=self._sampling.count)
        self._file.end()
        self.sampler = None

    # -- the record -------------------------------------------------------------------------------

    @property
    def _sampling(self) -> Sampler:
        assert self.sampler is not None
        return self.sampler

    def _write(self, kind: str, *, early: bool = False, **fields: Any) -> None:
        if self.run.world.rank == 0:
            self._file.write(kind, early=early, **fields)

    @_harmless
    def _sample(self, values: Mapping[str, Any]) -> None:
        pace, sample = self._pace, {**values}
        if pace is not None:
            if values["own"] is not None:
                pace.note(values)
            if pace.slowest:
                sample["ranks"], pace.slowest = pace.slowest, []
            while pace.said:
                self._write("warning", step=values["step"], text=pace.said.popleft())
        if self.run.world.rank == 0:
            self.latest = {"memory": self.latest.get("memory", {}), **values}
            self._write("step", **sample)

    def metrics(self, flops: Mapping[str, float | None]) -> dict[str, Any]:
        """Return what `accel_monitor.metrics` gives.

        flops: rate -> model FLOPs of one of them, or None.

        Raises:
            AccelError: the main process was to keep no record.
        """
        if not self._is_asked and self.run.world.rank == 0:
            raise AccelError(
                "metrics() has the values of the run's record, and this run keeps none\n"
                "set project_dir to a local folder, and monitor.every above 0"
            )
        sample = self.latest
        found = {name: sample.get(name) for name in RATES}
        found |= {f"{part}_seconds": seconds for part, seconds in sample.get("split", {}).items()}
        found |= {f"memory_{part}": size for part, size in sample.get("memory", {}).items()}
        found["mfu"] = utilization(self.run, sample, flops)
        return {name: value for name, value in found.items() if value is not None}


def _leave(monitor: weakref.ref[Monitor]) -> None:
    """In a fork: let go of the file, which is its parent's, and of its lock."""
    if (mine := monitor()) is not None and mine.sampler is not None:
        mine.sampler.marks = None
        mine.sampler = None
        mine.close_record()


def _nested(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _nested(inner, change) for key, inner in value.items()}
    return change(value)
