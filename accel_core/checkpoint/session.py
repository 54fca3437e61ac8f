"""The checkpoints of one run: save, load, wait, and stop when told to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_core.distributed.watch import assemble
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.copies import Copies
    from accel_core.checkpoint.preemption import Preemption
    from accel_core.checkpoint.retention import CheckpointSeries
    from accel_core.checkpoint.save import Saver
    from accel_core.checkpoint.stored import Place
    from accel_core.contract.run import Run


class CheckpointSession:
    """State that one save or load of a run leaves to the next.

    Only the session and its series write it.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._saver: Saver | None = None
        self._copies: Copies | None = None
        self._preemption: Preemption | None = None
        self._is_preempted = False

    @cached_property
    def series(self) -> CheckpointSeries:
        """The numbers and the lineage of the run's checkpoints."""
        from accel_core.checkpoint.retention import CheckpointSeries  # late: start-up need not wait for it

        return CheckpointSeries(self.run)

    def _prepare_copies(self) -> Copies:
        from accel_core.checkpoint.copies import Copies  # late: start-up need not wait for it

        self._copies = self._copies or Copies(self.series)
        return self._copies

    def check_place(self) -> None:
        """Refuse a project's URL that cannot be reached. Raises CheckpointError."""
        project = self.run.config.project
        is_url = "://" in (project.project_dir or "")
        if not project.automatic_checkpoint_naming or not (is_url or project.store):
            return
        if project.store and (is_url or "://" not in project.store):
            raise CheckpointError(
                f"project.store {project.store!r} is for copies of checkpoints that are saved in"
                f" {project.project_dir or 'the working folder'!r}\n"
                "give a local folder as project.project_dir, and a URL as project.store"
            )
        # late: start-up need not wait for them
        from accel_core.checkpoint.bound import Bound
        from accel_core.checkpoint.votes import Votes
        from accel_core.distributed.progress import show_progress

        bound = Bound(Votes.of(self.run, alone=True).patience, renewed=True)
        with show_progress(f"looking at {project.store or project.project_dir}"), bound.applied():
            if is_url:
                self.series.folder.exists()
            else:
                self._prepare_copies().plan()

    def save(
        self,
        directory: str | os.PathLike[str] | Place | None,
        *,
        step: int | None = None,
        wait: bool = True,
        alone: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> Place:
        """Save all state of the run as the checkpoint `directory`.

        Collective: all ranks, one directory. With `alone` it is not collective: this rank saves what it
        holds as the checkpoint of a world of one.

        Until it is complete, a checkpoint that was there before stays; a kill at any instant leaves one
        of the two, whole. `step` and `metrics` are recorded; those of a numbered one have that of
        `project.keep_best`. Without a directory it is the next of the numbered ones, and those over
        `total_limit` are removed once it is complete. With `wait=False` a copy of the state is taken now,
        and a thread writes it while training goes on; the next save waits for that, and raises what went
        wrong, as do `wait` and the end of the run. Once the job was told to stop, a numbered one is copied
        to `project.store` though that is not due.

        Raises:
            CheckpointError: a unit has gradients that are not applied yet, something cannot be stored, the
                directory holds something else, a rank failed to write, now or in the save before, or
                `alone` this rank holds only a part of something.
                Raised on all ranks; what was there before is unchanged.
        """
        from accel_core.checkpoint.save import Saver  # late: start-up need not wait for it

        run = self.run
        run.require_alive()
        if not alone:
            objects = len(run.registered)
            assemble(run, "save_state", f"{objects} registered object(s)" if objects else "")
        if self._saver is None or self._saver.alone is not alone:
            self._wait_for_save()
            self._saver = Saver(run, self.series, self._prepare_copies(), alone=alone)
        return self._saver.save(directory, step=step, wait=wait, metrics=metrics, at_once=self._is_preempted)

    def load(
        self,
        directory: str | os.PathLike[str] | Place | None,
        *,
        strict: bool = True,
        missing_ok: bool = False,
        best: bool = False,
    ) -> Place | None:
        """Bring the run into the state that the checkpoint `directory` holds.

        Collective: all ranks.

        The checkpoint may have been saved by another stack, or at another world size; what that means for
        random numbers is said in docs/checkpoint-format.md. Runs no code of the checkpoint's. Gradients are
        dropped, and windows begin anew: a checkpoint is taken between two.
        `strict=False` loads what fits and logs the rest. Without a directory it is the newest valid one of
        the numbered, or the `best`; what is damaged is logged and passed over. Returns the folder that was
        loaded; None, with `missing_ok`, if there is none.

        Raises:
            CheckpointError: it is not a checkpoint, a file is damaged, or (strict) the run has other state
                than it has: missing, unexpected and mismatched states are named; or a save that was under
                way has failed. Raised on all ranks, before any state is touched. Or code of the user's own
                or of a plugin failed while state was being restored: the message says what, and what has
                changed.
        """
        from accel_core.checkpoint.agree import run_on_all_ranks  # late: start-up need not wait for it
        from accel_core.checkpoint.collect import without_collecting_garbage
        from accel_core.checkpoint.load import load

        run = self.run
        run.require_alive()
        assemble(run, "load_state")
        # One rank may have saved alone, so that the others have nothing to wait for.
        run_on_all_ranks(
            run.collectives("control"), "load_state: wait for the save before", self._wait_for_save
        )
        if run.config.project.store:  # it may be what is loaded; its error stays for `wait`
            self._prepare_copies().wait_together("load_state", run.world.size)
        with without_collecting_garbage():  # until `load` has dropped what it made
            loaded = load(run, self.series, directory, strict=strict, missing_ok=missing_ok, best=best)
        if loaded is None:
            return None
        folder, manifest = loaded
        run.resume(manifest.run_id)
        self.series.resume(manifest)
        if self._copies is not None and directory is None and not best and isinstance(folder, Path):
            self._copies.make_up(manifest)
        return folder

    def wait(self, patience: float | None = None) -> None:
        """Wait for the save that is under way and then for its copy.

        Not collective. `patience`: the most seconds to wait for each. Unset: what goes to a store is waited
        for up to ten times `process_group.timeout`.

        Raises:
            CheckpointError: one of them failed; raised once. If both did, the copy's is raised next.
        """
        try:
            self._wait_for_save(patience)
        except CheckpointError:
            if self._copies is not None:
                self._copies.join(patience)
            raise
        if self._copies is not None:
            self._copies.wait(patience)

    def _wait_for_save(self, patience: float | None = None) -> None:
        if self._saver is not None:
            self._saver.wait(patience)

    def is_preempted(self, signals: Sequence[int], check: Callable[[], None]) -> bool:
        """Ask whether all ranks stop now, because one was told to.

        All ask, after each step.

        The first call begins to watch for these signals, once `check` has not raised.

        Raises:
            CheckpointError: a rank does not answer.
        """
        from accel_core.checkpoint.preemption import Preemption  # late: start-up need not wait for it

        if self._preemption is None:
            check()
            self._preemption = Preemption(self.run, signals)
        # A checkpoint holds no gradients: within a window there is nothing to ask yet.
        self._is_preempted = all(unit.window.boundary for unit in self.run.units) and self._preemption.due()
        return self._is_preempted

    def hear_signals(self) -> None:
        """Let a signal end the process again; only its wait, if it is stopping for one."""
        if self._is_preempted:
            self.interrupt_by_signals()
        else:
            self.end_watch()

    def interrupt_by_signals(self) -> None:
        """Let a signal that is watched for end a wait, as Ctrl-C does."""
        if self._preemption is not None:
            self._preemption.interrupt(again=self._is_preempted)

    def end_watch(self) -> None:
        """Watch for signals no more."""
        if self._preemption is not None:
            self._preemption.end()

    def free_memory(self) -> None:
        """Free the copy of the state that a save with `wait=False` keeps for the next."""
        if self._saver is not None:
            self._saver.free_memory()

    def forget_groups(self) -> None:
        """Drop what holds the process group."""
        self._saver = None
