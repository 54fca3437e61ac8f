"""The checkpoints of one run: save, load and wait."""

from __future__ import annotations

import gc
import math
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from attrs import frozen

from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from accel_core.contract.run import Run
    from accel_core.storage.commit import Manifest
    from accel_core.storage.protocols import Comm, Storage
    from accel_core.storage.saver import Saver
    from accel_core.storage.series import Numbering, Series
    from accel_core.storage.state import State


@frozen
class LoadedState:
    """The checkpoint that was loaded, and the arguments of its save. `str(state)` is the directory."""

    directory: Path | str
    """A URL is a str."""
    step: int | None
    metrics: Mapping[str, float]
    extra: Mapping[str, Any]
    """Tensors are on the CPU."""

    def __str__(self) -> str:
        return str(self.directory)


class CheckpointSession:
    """Saves and loads of a run, and the data that a save or load leaves to the next.

    Only the session and its series change these data.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._comm: Comm | None = None
        self._saver: Saver | None = None
        self._step: int | None = None
        """The step of the save under way, or None if no step is known."""

    @cached_property
    def series(self) -> Series:
        """Numbers and lineage of the run's checkpoints."""
        from accel_core.storage.series import Series  # late: start-up need not wait for it

        return Series(self._numbering, self.run.config.project.iteration)

    def _numbering(self) -> Numbering:
        from accel_core.checkpoint.places import storage_at
        from accel_core.contract.config import metric_and_mode
        from accel_core.storage.series import Numbering

        project = self.run.config.project
        folder = storage_at(project.project_dir or ".", each_node=project.save_on_each_node).at("checkpoints")
        best = None if project.keep_best is None else metric_and_mode(project.keep_best)
        return Numbering(folder, self.run.run_id, project.total_limit, best)

    @property
    def comm(self) -> Comm:
        """The ranks of the run. The first use is collective."""
        from accel_core.distributed.together import RunComm  # late: start-up need not wait for it

        self._comm = self._comm or RunComm(self.run)
        return self._comm

    def check_place(self) -> None:
        """Raise CheckpointError if the project's URL cannot be reached."""
        project = self.run.config.project
        if project.automatic_checkpoint_naming and "://" in (project.project_dir or ""):
            from accel_core.distributed.progress import show_progress  # late: start-up need not wait for them
            from accel_core.storage.files import listed

            with show_progress(f"looking at {project.project_dir}"):
                listed(self.series.folder)

    def save(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        step: int | None = None,
        wait: bool = True,
        alone: bool = False,
        metrics: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Storage:
        """Save all state of the run as the checkpoint `directory`.

        Collective, with the same directory on all ranks, unless `alone` is set. An earlier checkpoint in the
        directory stays until the new checkpoint is complete: a kill at any instant leaves a whole checkpoint.

        Args:
            directory: path or URL. None: the next numbered checkpoint; once it is complete, numbered
                checkpoints over `total_limit` are removed.
            step: recorded in the checkpoint. Default: the most steps that a prepared optimizer has done.
            wait: False: copy the state now, and write the copy in a thread while training continues. An error
                is raised by the next save, by `wait` or at the end of the run, which all wait for the thread.
            alone: not collective: save the state of this rank as the checkpoint of a world of one.
            metrics: recorded in the checkpoint. Numbered checkpoints need the metric of `project.keep_best`.
            extra: values of the caller's own to store.

        Raises:
            CheckpointError: a unit has gradients that are not applied yet, a value cannot be stored, the
                directory holds other files, a rank failed to write in this or the previous save, or this
                rank has only a part of a tensor and `alone` is set. Raised on all ranks; earlier files are
                unchanged.
        """
        from accel_core.checkpoint.collect import collect
        from accel_core.checkpoint.places import storage_at
        from accel_core.checkpoint.tasks import Save
        from accel_core.contract.config import metric_and_mode
        from accel_core.storage.ranks import Alone
        from accel_core.storage.saver import Saver

        run, series = self.run, self.series
        run.require_alive()
        if self._saver is None or isinstance(self._saver.comm, Alone) is not alone:
            self.wait()
            self._saver = Saver(Alone() if alone else self.comm)
        saver, project = self._saver, run.config.project
        if step is None:
            step = max((proxy.steps_done for _, proxy in run.prepared.optimizers), default=None)
        where = None if directory is None else storage_at(directory, each_node=project.save_on_each_node)

        def collected() -> State:
            # Here, after the wait for the save before: its `checkpoint_committed` still gets its own number.
            self._step = None if step is None else operator.index(step)
            by_metric = None if directory is not None else project.keep_best
            metric = None if by_metric is None else metric_and_mode(by_metric)[0]
            values = _metrics_as_json(metrics, metric)
            state = collect(Save(run, extra, alone), values)
            state.members = partial(self._members, len(saver.comm.nodes), values)
            return state

        with without_collecting_garbage():
            pending = saver.save(collected, series, where, wait=wait, wait_for_previous_save=self.wait)
        if wait:
            self.wait()  # it is over: this raises its error, and tells plugins
        return pending.place

    def _members(self, ranks: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of a manifest that describe the run."""
        import platform
        from datetime import datetime, timezone

        import torch

        from accel_core._version import __version__

        run = self.run
        readers = run.topology.readers if ranks == run.world.size else 1
        exact_at = {"size": ranks, "readers": readers}
        versions = {
            "accel-core": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        return {
            "step": self._step,
            "metrics": metrics,
            "run_id": run.run_id,
            "lineage": self.series.lineage,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "world": {**exact_at, "nodes": run.world.nodes},
            "mesh": {dim.name: dim.size for dim in run.mesh.dims} if run.mesh else {},
            "stack": {
                "summary": str(run.stack),
                "device": run.device.type,
                "units": {unit.name: unit.strategy for unit in run.units},
                "plugins": self._plugins,
            },
            "versions": versions,
            "config": self._config,
            "random": {"exact_at": exact_at, "elsewhere": "derived"},
        }

    @cached_property
    def _plugins(self) -> dict[str, Any]:
        members = self.run.stack.members()
        return {each.name: {"distribution": each.record.origin, "why": each.why} for each in members}

    @cached_property
    def _config(self) -> Any:
        return self.run.resolved.tree

    def load(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        strict: bool = True,
        missing_ok: bool = False,
        best: bool = False,
    ) -> LoadedState | None:
        """Restore the run's state from the checkpoint `directory`. Collective.

        The checkpoint may come from another stack or world size; docs/checkpoint-format.md describes the
        effect on random numbers. Runs no code of the checkpoint. Gradients are dropped, and windows start
        anew, because checkpoints are saved between windows.

        Args:
            directory: path or URL. None: the newest valid numbered checkpoint; damaged checkpoints are logged
                and passed over.
            strict: False: load the state that fits, and log the differences.
            missing_ok: return None if there is no checkpoint.
            best: take the numbered checkpoint with the best `project.keep_best` instead of the newest.

        Raises:
            CheckpointError: the directory is not a checkpoint, a file is damaged, (strict) the state of the
                checkpoint and of the run differ, with all differences named, or a save that was under way has
                failed. Raised on all ranks, before any state is changed. Also if code of the user or of a
                plugin failed during the restoration: the message names the code and the changed state.
        """
        from accel_core.checkpoint.load import Search, load
        from accel_core.checkpoint.places import as_user_path, storage_at

        run, project = self.run, self.run.config.project
        run.require_alive()
        where = None if directory is None else storage_at(directory, each_node=project.save_on_each_node)
        search = Search(self.series, where, project.keep_best if best else None, missing_ok)
        with without_collecting_garbage():  # until `load` has dropped its temporary objects
            loaded = load(run, self.comm, search, strict=strict, wait_for_previous_save=self.wait)
        if loaded is None:
            return None
        found, manifest, extra = loaded
        if run.world.run_id is None:  # a run that a launcher has named keeps its own id
            run.run_id = manifest.run_id
        self.series.resume(manifest)
        return LoadedState(as_user_path(found), manifest.members.get("step"), _metrics_of(manifest), extra)

    def wait(self, patience: float | None = None) -> None:
        """Wait at most `patience` seconds for the save that is under way. Not collective.

        Raises:
            CheckpointError: the save failed; raised once.
        """
        if self._saver is not None and (pending := self._saver.wait(patience)) is not None:
            from accel_core.checkpoint.places import as_user_path  # late: start-up need not wait for it

            self.run.hooks.checkpoint_committed(as_user_path(pending.place), self._step)

    def free_memory(self) -> None:
        """Free the memory for copies of the state, which saves with `wait=False` keep for the next save."""
        if self._saver is not None:
            self._saver.free_memory()

    def forget_groups(self) -> None:
        """Drop the objects that reference the process group."""
        self._saver = self._comm = None


def _metrics_as_json(metrics: Mapping[str, Any] | None, needed: str | None) -> dict[str, float | str]:
    """Return the metrics for a manifest, with NaN and infinity as text.

    Raises:
        CheckpointError: the metric `needed`, of `keep_best`, is missing.
    """
    values = {name: float(value) for name, value in (metrics or {}).items()}
    if needed is not None and needed not in values:
        raise CheckpointError(
            f"save_state: project.keep_best goes by the metric {needed!r}, which is not among the"
            f" metrics ({', '.join(values) or 'none'})\n"
            f"call save_state(metrics={{{needed!r}: value}}) on all ranks"
        )
    return {name: value if math.isfinite(value) else repr(value) for name, value in values.items()}


def _metrics_of(manifest: Manifest) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in manifest.members.get("metrics", {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the manifest's metrics are not numbers: {error}\n"
            "load another checkpoint: `accel checkpoint list` shows those of a project"
        ) from error


@contextmanager
def without_collecting_garbage() -> Iterator[None]:
    """Disable the garbage collector while many objects are made and dropped at once.

    A search for cycles would find no cycle, and take as long as the rest of a save.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
