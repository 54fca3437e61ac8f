"""Save a run: snapshot its state on all ranks, and start to write it."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from accel_core._version import __version__
from accel_core.checkpoint.agree import gather_from_all_ranks, run_on_all_ranks
from accel_core.checkpoint.bound import Bound
from accel_core.checkpoint.collect import (
    Collected,
    check_names,
    collect,
    split_rank_state,
    without_collecting_garbage,
)
from accel_core.checkpoint.declarations import gather_groups
from accel_core.checkpoint.disks import Disks
from accel_core.checkpoint.files import as_json
from accel_core.checkpoint.layout import Layout
from accel_core.checkpoint.metrics import plain_metrics, plain_step, require_alike
from accel_core.checkpoint.pending_save import PendingSave, Share
from accel_core.checkpoint.plan import plan
from accel_core.checkpoint.replicas import Replicas
from accel_core.checkpoint.stored import Place, StoredPath, told
from accel_core.checkpoint.stored_target import StoredTarget
from accel_core.checkpoint.target import SaveTarget
from accel_core.checkpoint.votes import Votes
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_core.checkpoint.copies import Copies, Plan
    from accel_core.checkpoint.retention import CheckpointSeries
    from accel_core.contract.run import Run
    from accel_core.contract.world import Collectives


class Saver:
    """Saves one run, again and again: it keeps what one save leaves to the next.

    Made by all ranks; `alone`, by the rank that saves.
    """

    def __init__(self, run: Run, series: CheckpointSeries, copies: Copies, *, alone: bool) -> None:
        self.run, self.alone, self._series, self._copies = run, alone, series, copies
        self.control = run.collectives("alone" if alone else "control")
        self._votes = Votes.of(run, alone=alone)
        self._layout: Layout | None = None
        self._pending: PendingSave | None = None
        self._disks = self._planned_for = Disks.of(run, self.control)

    def save(
        self,
        directory: str | os.PathLike[str] | StoredPath | None,
        *,
        step: int | None,
        wait: bool,
        metrics: Mapping[str, Any] | None,
        at_once: bool = False,
    ) -> Place:
        """See `CheckpointSession.save`."""
        keep_best = self.run.config.project.keep_best if directory is None else None
        noted: dict[str, Any] = {}

        def ready() -> tuple[Plan, dict[str, float | str]]:
            self.wait()
            noted["step"] = plain_step(step)
            return self._copies.plan(at_once=at_once), plain_metrics(metrics, keep_best)

        of_ranks = gather_from_all_ranks(self.control, "save_state: wait for the save before", ready)
        plans, measured = zip(*of_ranks, strict=True)
        require_alike(measured)
        noted["metrics"] = measured[0]
        with without_collecting_garbage():
            self._pending = pending = self._snapshot(directory, noted, wait=wait)
            if wait:  # before garbage is collected again: it drops most of what was made for it
                bound = Bound(self._votes.patience, renewed=self.control.size == 1)
                with pending.shown(), bound.applied():
                    pending.run()
        if wait:
            self.wait()
        else:
            pending.start()
        self._copies.follow(pending, plans, self._votes)
        return pending.target.path

    def _snapshot(
        self, directory: str | os.PathLike[str] | StoredPath | None, noted: Mapping[str, Any], *, wait: bool
    ) -> PendingSave:
        """Do all that is collective or reads the run's state; the rest only writes."""
        run, control, disks = self.run, self.control, self._disks
        where = self._series.folder if directory is None else directory
        if isinstance(where, StoredPath):  # which is one place for all nodes
            disks = Disks(control.rank, [0] * control.size)
        if run.mark_step is not None:
            run.mark_step("state")
        state = run_on_all_ranks(control, "save_state: collect", lambda: self._collect(wait=wait))
        split_rank_state(control, state)
        layout = self._layout_of(state, disks)
        if control.size > 1:
            layout.replicas.compare(control, state.leaves, state.declared)
        target: SaveTarget | StoredTarget
        if isinstance(where, StoredPath):
            target = StoredTarget.choose(self._series, control, None if directory is None else where, disks)
        else:
            given = None if directory is None else where
            target = SaveTarget.choose(self._series, control, given, disks, layout.size)

        def share() -> Share:
            # Each disk has the state of rank 0: one file, though several write it.
            shared = as_json(state.shared) if disks.is_first else None
            body = layout.read(state.leaves) if wait else layout.stage(state.leaves)
            return Share(
                control.rank, layout.head, body, layout.size, as_json(state.own), layout.index, shared
            )

        try:
            mine = run_on_all_ranks(control, "save_state: copy", share)
            if disks.are_several:
                shared = control.broadcast_object(mine.state)
                mine.state = shared if disks.is_first else None
            manifest = {**_named(target), **noted, **_manifest(run, control)}
        except BaseException:  # no memory for the copy, Ctrl-C: nothing half-written stays
            if disks.is_first:
                target.discard()
            raise
        votes = self._votes.under(f"save/{target.save_id}")
        return PendingSave(target, noted["step"], mine, control.size, manifest, votes)

    def wait(self, patience: float | None = None) -> None:
        """See `CheckpointSession.wait`."""
        pending = self._pending
        if pending is None:
            return
        try:
            pending.wait(patience)
        finally:
            if (
                pending.is_over or pending.is_given_up
            ):  # else Ctrl-C has ended the wait only: a thread still reads the copy
                self._pending = None
        self.run.hooks.checkpoint_committed(told(pending.target.path), pending.step)

    def free_memory(self) -> None:
        """Give back the memory of the copy.

        What a thread still writes, it holds until it has ended.
        """
        self._layout = None

    def _collect(self, *, wait: bool) -> Collected:
        for unit in self.run.units:
            if not (wait or unit.hooks.snapshot_safe(unit)):
                raise CheckpointError(
                    f"save_state(wait=False): the state of unit {unit.name!r} cannot be copied while strategy"
                    f" {unit.strategy!r} holds it\nsave with wait=True"
                )
        return collect(self.run, alone=self.alone)

    def _layout_of(self, state: Collected, disks: Disks) -> Layout:
        """Return the layout of the save before, while no leaf changes on any rank.

        Else a new one.
        """
        before, control = self._layout, self.control
        same = before is not None and before.declared == state.declared and self._planned_for == disks
        name = before.name if before is not None and same else None
        names = set(gather_from_all_ranks(control, "save_state: compare layouts", lambda: name))
        if before is not None and len(names) == 1 and None not in names:
            return before
        self._layout = before = None  # with its buffer, before the next one is made
        self._planned_for = disks

        word, groups = gather_groups(control, state.declared, lambda: check_names(self.run, state))
        try:
            writes = plan(groups, control.rank, disks.of_rank)
        except CheckpointError as error:
            if not self.alone:
                raise
            text = f"save_state(alone=True): this rank does not hold the whole state\n{error}"
            raise CheckpointError(f"{text}\ncall save_state() without alone, on all ranks") from error
        replicas = Replicas.of(groups, control.rank)
        self._layout = Layout.of(word, state.declared, writes, state.leaves, replicas)
        return self._layout


def _named(target: SaveTarget | StoredTarget) -> dict[str, Any]:
    """Return the members of the manifest that describe the save."""
    return {
        "name": target.path.name if target.numbered else None,
        "iteration": target.number,
        "save_id": target.save_id,
        "run_id": target.series.run.run_id,
        "lineage": target.series.lineage,
        "domains": target.disks.member,
    }


def _manifest(run: Run, control: Collectives) -> dict[str, Any]:
    readers = run.topology.readers if control.size == run.world.size else 1
    exact_at = {"size": control.size, "readers": readers}
    members = [(chosen.name, chosen.record, chosen.why) for chosen in run.stack.members()]
    versions = {"accel-core": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world": {**exact_at, "nodes": run.world.nodes},
        "mesh": {dim.name: dim.size for dim in run.mesh.dims} if run.mesh else {},
        "stack": {
            "summary": str(run.stack),
            "device": run.device.type,
            "units": {unit.name: unit.strategy for unit in run.units},
            "plugins": {name: {"distribution": record.origin, "why": why} for name, record, why in members},
        },
        "versions": versions,
        "config": run.resolved.tree,
        "random": {"exact_at": exact_at, "elsewhere": "derived"},
    }
