"""The record that a run keeps of itself."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from accel_core.contract import hooks
from accel_core.contract.hooks import implements
from accel_core.contract.options import masked
from accel_core.errors import AccelError
from accel_core.runtime.sampling import Reads, StepSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel_core.contract.config import RunConfig
    from accel_core.contract.run import Run
    from accel_core.contract.state import Json
    from accel_core.data.loader import PreparedLoader
    from accel_core.defaults.lines import LineFile
    from accel_core.runtime.pace import Pace

FOLDER: Final = "records"
"""In the project's folder."""
GIT: Final = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
GIT_SECONDS: Final = 2.0
METRICS: Final = ("seconds", "samples_per_second", "items_per_second")

M = TypeVar("M", bound=Callable[..., Any])


def _harmless(method: M) -> M:
    """Make a method end the record where it fails, and do nothing afterwards."""

    @wraps(method)
    def call(self: RunRecord, *arguments: Any) -> None:
        if self.active:
            try:
                method(self, *arguments)
            except Exception as error:  # no error of the record may end the training
                self.fail(error)

    return call  # type: ignore[return-value]


class RunRecord:
    """Write `project_dir/records/START-RUN.jsonl`, on the main process.

    Other ranks take samples for their pace.

    The file is made for the first event. A run that loads a checkpoint goes on in the file that the
    checkpoint names. An error ends the record with one warning, and never the training.
    active: whether this rank takes samples.
    """

    def __init__(self, run: Run) -> None:
        project = run.config.project
        self.run = run
        self._is_asked = bool(project.record_every) and _is_local(project.project_dir)
        self.active = self._is_asked
        if self.active and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_leave, weakref.ref(self)))
        started = time.strftime("%Y%m%d-%H%M%S")
        self._name = f"{started}-{re.sub('[^0-9A-Za-z]+', '', run.run_id)[:8]}"
        self._file: LineFile | None = None
        self._early: list[dict[str, Any]] = []
        """Lines that wait for the first event: a checkpoint may still name the file."""
        self._first_step = 0
        self._saved_at: tuple[int, float] | None = None
        self._latest: dict[str, Any] = {}
        """The values of the last sample, and the last memory."""
        self._pace: Pace | None = None
        self.sampler = StepSampler(run, project.record_every, self._sample, self.fail)

    @_harmless
    def begin_unit(self) -> None:
        """Sample the first step of the units that the run has now."""
        self.sampler.begin()

    def reads(self, batches: Iterator[Any], loader: PreparedLoader, done: int) -> Iterator[Any]:
        """Return the same batches, timed in sampled steps. done: batches before them."""
        return Reads(batches, loader, done, self.sampler) if self.active else batches

    @_harmless
    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Note values that the program logs, without waiting for the device."""
        if self.run.world.rank:
            return
        copied, done = _nested(values, self.sampler.copied), self.sampler.count
        self.sampler.when_copied(lambda: self._write("log", step=done, given=step, values=copied))

    @_harmless
    def warn(self, text: str) -> None:
        """Note a warning."""
        self._write("warning", early=True, step=self.sampler.count, text=masked(text))

    @_harmless
    def note_profile(self, path: Path) -> None:
        """Note a trace that the profiler has written."""
        self._write("profile", early=True, step=self.sampler.count, path=os.fspath(path.absolute()))

    def fail(self, error: Exception) -> None:
        """End the record, with a warning."""
        if self.active:
            self.active, self._latest = False, {}
            self.sampler.stop()
            if self._file is not None:
                self._file.close()
            text = f"the run's record ends, and training goes on: {type(error).__name__}: {error}"
            warnings.warn(text, stacklevel=2)

    def metrics(self, flops: Mapping[str, float | None]) -> dict[str, Any]:
        """Return what `Accelerator.metrics` gives.

        flops: rate -> model FLOPs of one of them, or None.

        Raises:
            AccelError: the main process was to keep no record.
        """
        if not self._is_asked and self.run.world.rank == 0:
            raise AccelError(
                "metrics() has the values of the run's record, and this run keeps none\n"
                "set project_dir to a local folder, and project.record_every above 0"
            )
        from accel_core.runtime.utilization import utilization  # late: start-up need not wait for it

        sample = self._latest
        found = {name: sample.get(name) for name in METRICS}
        found |= {f"{part}_seconds": seconds for part, seconds in sample.get("split", {}).items()}
        found |= {f"memory_{part}": size for part, size in sample.get("memory", {}).items()}
        found["mfu"] = utilization(self.run, sample, flops)
        return {name: value for name, value in found.items() if value is not None}

    # -- what is written --------------------------------------------------------------------------

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
            self._latest = {"memory": self._latest.get("memory", {}), **values}
            self._write("step", **sample)

    def _write(self, kind: str, *, early: bool = False, **fields: Any) -> None:
        """Write a line, on the main process.

        early: it may wait until the first line that may not.
        """
        if self.run.world.rank:
            return
        if self._file is None and early:
            self._early.append({"kind": kind, **fields})
            return
        if self._file is None:
            self._file = self._opened()
            for line in ({"kind": "run", **self._heading()}, *self._early):
                self._file.write(**line)
        self._file.write(kind=kind, **fields)

    def _opened(self) -> LineFile:
        """Open the file; another one beside it, if a process that lives writes to it."""
        from accel_core.defaults.lines import LineFile  # late: start-up need not wait for it

        folder, number = Path(str(self.run.config.project.project_dir), FOLDER), 1
        while True:
            file = LineFile(folder / f"{self._name}{f'-{number}' if number > 1 else ''}.jsonl")
            try:
                import fcntl

                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                number += 1
                continue
            except (ImportError, OSError):  # Windows, or a file system without locks
                pass
            return file

    def _heading(self) -> dict[str, Any]:
        from accel_core.runtime.explain import explain  # late: start-up need not wait for it

        run = self.run
        stack = {chosen.name: chosen.record.origin for chosen in run.stack.members()}
        module = sys.modules.get(f"torch.{run.device.type}")
        name = getattr(module, "get_device_name", str)(run.device)
        return {
            "run": run.run_id,
            "step": self._first_step,
            "script": sys.argv[0],
            "explain": explain(run).splitlines(),
            "config": [*run.resolved.rows()],
            "notes": [*run.resolved.notes, *run.stack.notes],
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__), **stack},
            "git": _git_state(),
            "processes": run.world.size,
            "restarts": run.world.restart_count,
            "host": platform.node(),
            "device": {"type": run.device.type, "name": name},
            "device_specs": dict(run.hooks.device_specs(run.device)),
            "mesh": None if run.mesh is None else {dim.name: dim.size for dim in run.mesh.dims},
        }

    # -- hooks ------------------------------------------------------------------------------------

    @implements(hooks.run_started)
    @_harmless
    def run_started(self, run_id: str, config: RunConfig) -> None:
        if self.run.world.size > 1:
            from accel_core.runtime.pace import Pace  # late: start-up need not wait for it

            self._pace = Pace(self.run.world)

    @implements(hooks.tracking_started)
    @_harmless
    def tracking_started(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._write("settings", early=True, project=project, values=config)

    @implements(hooks.save_run_state)
    def save_run_state(self) -> Mapping[str, Json]:
        if not self.active:
            return {}
        self._saved_at = self.sampler.count, time.perf_counter()
        self.sampler.mark("other")
        return {"name": self._name, "step": self.sampler.count}

    @implements(hooks.load_run_state)
    @_harmless
    def load_run_state(self, state: Mapping[str, Any]) -> None:
        self._first_step = int(state["step"])
        self.sampler.move_to(self._first_step)
        if self._file is not None:
            self._write("restart", step=self.sampler.count)
        elif re.fullmatch(r"[\w-]+", state["name"]):  # it becomes a path
            self._name = state["name"]

    @implements(hooks.checkpoint_committed)
    @_harmless
    def checkpoint_committed(self, folder: Path | str, step: int | None) -> None:
        begun, since = self._saved_at or (-1, 0.0)
        waited = begun == self.sampler.count  # else it was written while training went on
        if waited:
            self.sampler.mark("checkpoint")
        seconds = round(time.perf_counter() - since, 6) if waited else None
        self._write("checkpoint", step=begun, folder=os.fspath(folder), seconds=seconds)

    @implements(hooks.run_ended)
    @_harmless
    def run_ended(self) -> None:
        self.sampler.end()
        if self._pace is not None:
            self._pace.ended = True
        if self._file is not None or self._early:
            self._write("end", step=self.sampler.count)
        if self._file is not None:
            self._file.close()
        self.active = False


def _leave(record: weakref.ref[RunRecord]) -> None:
    """In a fork: let go of the file, which is its parent's, and of its lock."""
    if (mine := record()) is not None:
        mine.active = False
        if mine._file is not None:
            mine._file.close()


def _is_local(folder: str | None) -> bool:
    return folder is not None and "://" not in folder


def _git_state() -> str | None:
    """Return the commit of the working folder, or None.

    It ends in "-dirty" where files differ.
    """
    try:
        found = subprocess.run(  # noqa: S603  the command is ours
            GIT, capture_output=True, text=True, timeout=GIT_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):  # no git, or a repository too large to ask
        return None
    return found.stdout.strip() or None


def _nested(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _nested(inner, change) for key, inner in value.items()}
    return change(value)
