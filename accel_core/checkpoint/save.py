"""Saving: every rank writes its share beside the target, all agree, and the target appears at once."""

from __future__ import annotations

import os
import platform
import secrets
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store, default_pg_timeout

from accel_core._version import __version__
from accel_core.checkpoint.agree import agree
from accel_core.checkpoint.collect import (
    Collected,
    check_names,
    collect,
    keep_own_part,
    without_collecting_garbage,
)
from accel_core.checkpoint.files import as_json
from accel_core.checkpoint.layout import Layout
from accel_core.checkpoint.pending_save import Flight, Share
from accel_core.checkpoint.plan import plan
from accel_core.checkpoint.replicas import Replicas
from accel_core.checkpoint.target import Place
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.retention import CheckpointSeries
    from accel_core.contract.run import Run
    from accel_core.contract.world import Collectives

__all__ = ["Saver"]


class Saver:
    """Saves one run, again and again: what a save leaves to the next is kept here.

    Made by all ranks; `alone`, by the rank that saves.
    """

    def __init__(self, run: Run, series: CheckpointSeries, *, alone: bool) -> None:
        self.run, self.alone = run, alone
        self._series = series
        self.control = run.collectives("alone" if alone else "control")
        timeout = run.config.process_group.timeout or default_pg_timeout
        self._timeout = timeout.total_seconds()
        store: Any = run.world.store  # torch's stub lacks `clone`
        self._store: Store = HashStore() if store is None or alone else store.clone()
        self._layout: Layout | None = None
        self._flight: Flight | None = None
        project = run.config.project
        self._domains = self.control.all_gather_object(
            run.world.node_rank if project.save_on_each_node else 0
        )

    def save(self, directory: str | os.PathLike[str] | None, *, step: int | None, wait: bool) -> Path:
        """See `CheckpointSession.save`."""
        agree(self.control, self.settle)
        with without_collecting_garbage():
            self._flight = flight = self._snapshot(directory, step, wait=wait)
            if wait:  # before garbage is collected again: it drops most of what was made for it
                flight.run()
        if wait:
            self.settle()
        else:
            flight.start()
        return flight.place.target

    def _snapshot(self, directory: str | os.PathLike[str] | None, step: int | None, *, wait: bool) -> Flight:
        """All that ranks do together, and all that reads the run's state; the rest only writes."""
        run, control = self.run, self.control
        if run.mark_step is not None:
            run.mark_step("state")
        state = agree(control, lambda: self._collect(wait=wait))
        keep_own_part(control, state)
        layout = self._layout_of(state)
        if control.size > 1:
            layout.replicas.compare(control, state.leaves, state.declared)
        place = Place.choose(self._series, control, directory, self._domains)
        try:
            shared = agree(control, lambda: as_json(state.shared) if place.first else None)
            if len(place.firsts) > 1:  # one file, whatever disk it is on
                said = control.broadcast_object(shared)
                shared = said if place.first else None
            share = agree(control, lambda: _share(control.rank, state, layout, shared, stage=not wait))
            manifest = {**place.members, "step": step, **_manifest(run, control)}
        except BaseException:  # no memory for the copy, Ctrl-C: nothing half-written stays
            if place.first:
                place.discard()
            raise
        return Flight(place, step, share, control.size, manifest, self._store, self._timeout)

    def settle(self, patience: float | None = None) -> None:
        """Wait for the save that is under way, if one is, `patience` seconds at most. Not collective.

        Raises:
            CheckpointError: it failed; raised once.
        """
        flight = self._flight
        if flight is None:
            return
        try:
            flight.settle(patience)
        finally:
            if flight.over:  # else Ctrl-C has ended the wait only: a thread still reads the copy
                self._flight = None
        self.run.hooks.checkpoint_committed(flight.place.target, flight.step)

    def free(self) -> None:
        """Give back the memory of the copy; what a thread still writes, it holds until it has ended."""
        self._layout = None

    def _collect(self, *, wait: bool) -> Collected:
        for unit in self.run.units:
            if not (wait or unit.hooks.snapshot_safe(unit)):
                raise CheckpointError(
                    f"save_state(wait=False): the state of unit {unit.name!r} cannot be copied while strategy"
                    f" {unit.strategy!r} holds it\nsave with wait=True"
                )
        return collect(self.run)

    def _layout_of(self, state: Collected) -> Layout:
        """The layout of the save before, if on no rank any leaf has changed; else a new plan of all ranks."""
        known, control = self._layout, self.control
        same = known is not None and known.declared == state.declared
        votes = control.all_gather_object(known.name if known is not None and same else None)
        if known is not None and None not in votes and len(set(votes)) == 1:
            return known
        self._layout = None  # with its buffer, before the next one is made
        agree(control, lambda: check_names(self.run, state))
        declarations = control.all_gather_object(state.declared)
        try:
            writes = plan(declarations, self._domains)[control.rank]
        except CheckpointError as error:
            if not self.alone:
                raise
            text = f"save_state(alone=True): this rank does not hold the whole state\n{error}"
            raise CheckpointError(f"{text}\ncall save_state() without alone, on all ranks") from error
        made: str = control.broadcast_object(secrets.token_hex(8))
        replicas = Replicas.of(declarations, control.rank)
        self._layout = Layout.of(made, state.declared, writes, state.leaves, replicas)
        return self._layout


def _share(rank: int, state: Collected, layout: Layout, shared: bytes | None, *, stage: bool) -> Share:
    body = [layout.stage(state.leaves)] if stage else layout.read(state.leaves)
    return Share(rank, layout.head, body, layout.size, as_json(state.own), layout.index, shared)


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
