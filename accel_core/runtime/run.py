"""A run: everything that one `Accelerator` owns, from its config to its units.

Several runs, with different stacks, may live in one process. They share torch's process group, which is
global, and count its users.
"""

from __future__ import annotations

import atexit
import os
import traceback
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from attrs import evolve

from accel_core.checkpoint.session import CheckpointSession
from accel_core.contract.bound import Hooks, Steps
from accel_core.contract.run import live_runs
from accel_core.contract.unit import Unit
from accel_core.contract.window import Window
from accel_core.contract.world import Collectives, Topology, World
from accel_core.distributed.process_group import leave_group
from accel_core.distributed.stderr import tell
from accel_core.errors import AccelError, ConfigError
from accel_core.plugins.discovery import discover
from accel_core.plugins.tasks import refuse_lone_task, task_here
from accel_core.runtime.assembly import (
    Assembly,
    apply_launch_environment,
    check_capabilities,
    check_device,
    check_refusals,
    restore_environment,
)
from accel_core.runtime.exit import end_at_exit, end_runs, finish_dropped
from accel_core.runtime.join import agree_on_run, backends_of, join_world
from accel_core.runtime.preemption import StopSignals
from accel_core.runtime.selection import decide
from accel_core.runtime.tracking import Trackers
from accel_core.training.names import Names
from accel_core.training.prepared import PreparedObjects

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

    from accel_core.contract.bound import Implementation
    from accel_core.contract.card import Card
    from accel_core.contract.config import RunConfig
    from accel_core.contract.mesh import Mesh
    from accel_core.data.loader import PreparedLoader
    from accel_core.runtime.tracking import GeneralTracker
    from accel_core.training.accumulation import Accumulation

PATIENCE_SECONDS: Final = 60.0
"""Seconds that a process waits for its last save after a failure."""


class Run:
    """Config, stack, device, world and units of one `Accelerator`.

    Creating a run is collective: all ranks of the world must create it.

    Raises:
        ConfigError: the settings are impossible here, or differ between ranks.
        PluginError: a chosen plugin cannot be used.
        LaunchError: the process group cannot be created.
    """

    window_type: ClassVar[type[Window]] = Window
    """Class of the windows of units. A program that counts micro-batches itself takes a class of its own."""

    run_id: str
    plugins: Mapping[str, object]
    configs: Mapping[str, object]
    cards: Mapping[str, Card]
    mesh: Mesh | None = None
    group: ProcessGroup | None = None
    """The process group that the run uses; None in a world of one process."""
    ended: bool = True
    """True after `end`, and for a run that could not be created."""

    def __init__(
        self,
        *,
        python: Mapping[str, object] | None = None,
        objects: Sequence[object] = (),
        trackers: Sequence[GeneralTracker] = (),
        presets: Mapping[str, tuple[object, str]] | None = None,
    ) -> None:
        self.process = os.getpid()
        self.prepared = PreparedObjects()
        self.windows: Sequence[Window] = ()
        """The windows of the innermost `accumulate`, or of the last one if none is entered."""
        self._no_window = self.window_type()
        self.accumulation: Accumulation | None = None
        """The innermost `accumulate` that is entered."""
        self.active_loaders: list[PreparedLoader] = []
        self.trained_from: set[PreparedLoader] = set()
        """Loaders that were being iterated in an optimizer step."""
        self.registered: list[Any] = []
        self.unsaved_models: list[nn.Module] = []
        """Prepared models whose weights are left out of saved states: the program saves them itself."""
        self._dims: dict[str, Collectives] = {}
        self._meshes: dict[str, Mesh | None] = {}
        discovery = discover()
        task = task_here(discovery)
        self.world = World.here(task)
        if self.world.size == 1:
            refuse_lone_task(task, discovery)
        self.resolved, self.stack = decide(
            python or {}, objects, presets or {}, self.world.size, discovery=discovery
        )
        self.config: RunConfig = self.resolved.config
        self.accumulation_steps = self.config.accumulation_steps
        """Micro-batches per window, of units created from now on."""
        self.checkpoints = CheckpointSession(self)
        self.stop_signals = StopSignals(self)
        self.environment: list[str] = []
        self.ended = False
        try:
            self.environment_notes = apply_launch_environment(self)
            self._join(trackers)
        except BaseException:  # a plugin may raise anything, and the caller may create another run
            self.ended = True
            self._leave_world()
            restore_environment(self)
            raise

    def _join(self, trackers: Sequence[GeneralTracker]) -> None:
        """Set up plugins, device, process group, mesh and trackers. Collective."""
        self.run_id = self.world.run_id or uuid.uuid4().hex
        self._assembly = assembly = Assembly(self, trackers)
        self.plugins, self.configs, self.cards = assembly.plugins, assembly.configs, assembly.cards
        self.hooks: Hooks = self._assembly.hooks_of(self.stack.default)
        check_refusals(self)
        self.checkpoints.check_place()
        self.device: torch.device = self.hooks.select_device(self.world)
        check_device(self)
        self.mark_step = mark = self.hooks.step("mark_step")
        self.observe_collective = self.hooks.step("collective")
        self.after_backward = [] if mark is None else [lambda _: mark("backward")]
        finish_dropped()
        if self.world.size > 1:
            self.group, self.world = join_world(self)
            self.run_id, project = agree_on_run(self)
            self.reconfigure(project=project)
        self.mesh = self._mesh_of(self.hooks)
        self.topology = self._topology_over(self.mesh)
        self.trackers = Trackers(
            self, [*(c.name for c in self.stack.trackers), *(own.name for own in trackers)]
        )
        if self.world.rank == 0:
            notes = (*self.resolved.notes, *self.stack.notes)
            if notes:
                tell("".join(f"accel: {note}\n" for note in notes))
        self.hooks.run_started(self.run_id, self.config)
        live_runs.add(self)

    def __del__(self) -> None:
        # The program cannot end this run any more, but its threads and its process group still exist.
        if not self.ended:
            live_runs.discard(self)
            self.prepared, self.accumulation = PreparedObjects(), None
            self.registered, self.unsaved_models, self.active_loaders, self.trained_from = [], [], [], set()
            self.checkpoints.free_memory()
            end_at_exit(self)

    # -- its units, windows and settings ---------------------------------------------------------

    @property
    def units(self) -> list[Unit]:
        """The units of all prepared objects."""
        return self.prepared.units

    @property
    def window(self) -> Window:
        """The innermost current window, or the last window used."""
        return self.windows[-1] if self.windows else self._no_window

    @property
    def communication_backends(self) -> Mapping[str, str]:
        """Torch device type -> torch.distributed backend, for the run's device and the CPU."""
        return backends_of(self)

    def set_accumulation_steps(self, steps: int) -> None:
        """Set the micro-batches per window of every unit, from its next window on."""
        self.accumulation_steps = steps
        for window in {self.window, *(unit.window for unit in self.units)}:
            window.resize(steps, current=self.accumulation is None and window.boundary)

    def drop_accumulations(self) -> None:
        """End every `accumulate` context: Ctrl-C may have kept a context from ending."""
        while self.accumulation is not None:
            self.accumulation.drop()

    def collectives(self, dim: str = "world") -> Collectives:
        """Return collectives over a dimension. The first call for each dimension is collective."""
        if dim not in self._dims:
            self.require_alive()
            self._dims[dim] = self.hooks.collectives(dim)
        return self._dims[dim]

    def make_unit(self, name: str | None, strategy: str | None, made: Sequence[Unit] = ()) -> Unit:
        """Return a unit without objects, with the hooks of its strategy.

        `made` are other new units, whose names are taken too.
        """
        from accel_core.training.step_state import StepState  # late: start-up need not wait for it

        alias = strategy or self.stack.default
        taken = {unit.name for unit in (*self.units, *made)}
        name = name or next(free for number in count() if (free := f"unit{number}") not in taken)
        _require_new(name, taken)
        hooks = self.hooks_of(alias)
        steps, owner = Steps(hooks), hooks.implementations("backward")[-1].plugin
        models: list[nn.Module] = []
        return Unit(
            name=name,
            run=self,
            strategy=alias,
            plugin=self.plugins[alias],
            strategy_owns_backward=owner == alias,
            hooks=hooks,
            steps=steps,
            window=self.window_type(self.accumulation_steps),
            step_state=StepState.of(steps, self.mark_step, reduces=self.world.size > 1),
            mesh=self._mesh_for(alias, hooks),
            models=models,
            names=Names(models),
        )

    def hooks_of(self, strategy: str | None, name: str | None = None) -> Hooks:
        """Return the hooks of a strategy (None: the run's default), for a unit `name` that is created later.

        Raises:
            ConfigError: the run has a unit of this name already, or the strategy cannot be used.
        """
        _require_new(name, {unit.name for unit in self.units})
        alias = strategy or self.stack.default
        hooks = self._assembly.hooks_of(alias)
        if alias != self.stack.default:
            check_capabilities(self, hooks, alias)
        return hooks

    def reconfigure(self, **changes: Any) -> None:
        """Change the config from now on, for steps and for objects prepared later."""
        self.config = evolve(self.config, **changes)
        self.prepared.renew_trained()  # existing `accumulate` contexts read the config again

    def use_strategy(self, alias: str) -> None:
        """Use this strategy in later calls of `prepare` that do not name a strategy."""
        self.stack = evolve(self.stack, default=alias)

    def end(self, *, failed: bool = False) -> None:
        """Release units and process group; the run cannot be used afterwards. Idempotent.

        Waits for a save that is under way. After a failure other ranks may be gone: the wait is then short,
        and the process group is kept. Ctrl-C ends the wait only.

        Raises:
            CheckpointError: the save failed. If several steps of the end fail, all are tried; the last error
                is raised, and earlier errors are its context.
        """
        if self.ended:
            return
        self.stop_signals.restore_default_handlers()
        finished = self.trackers.names if self.trackers.has_finished else ()
        observers = [each for each in self.hooks.implementations("run_ended") if each.plugin not in finished]
        with ExitStack() as closing:  # makes all calls, the last one first, even if some raise
            closing.callback(restore_environment, self)
            if not failed:
                closing.callback(self._leave_world)
            for unit in reversed(self.units):
                closing.callback(_release, unit)
            for observer in reversed(observers):
                closing.callback(self._close, observer)
            closing.callback(self.stop_signals.end)
            closing.callback(self._refuse_use)
            try:
                self.checkpoints.wait(PATIENCE_SECONDS if failed else None)
            except KeyboardInterrupt:  # the run and its save go on
                closing.pop_all()
                raise

    def _close(self, observer: Implementation) -> None:
        """Let a plugin close its resources; a tracker's error is printed, since the training is complete."""
        try:
            observer.call()
        except Exception:  # a tracker may raise anything
            if observer.plugin not in self.trackers.names:
                raise
            tell(f"accel: tracker {observer.plugin!r} cannot close:\n{traceback.format_exc()}")

    def _refuse_use(self) -> None:
        self.ended = True
        self.prepared.refuse_steps(_ended)
        live_runs.discard(self)

    def release_units(self) -> None:
        """Let each plugin drop the ties of units to devices and groups (hook `release`).

        Afterwards no unit is in a step. The end of the run has released its units already.
        """
        self.drop_accumulations()
        for unit in () if self.ended else self.units:
            _release(unit)
        self.windows = ()
        self.prepared.refuse_steps(_forgotten)

    def _leave_world(self) -> None:
        """Drop the references to the process group, which its last user ends."""
        self.checkpoints.forget_groups()
        self._dims.clear()
        self._meshes.clear()
        group, self.group = self.group, None
        if group is not None:
            leave_group(group)

    def require_alive(self) -> None:
        """Raise AccelError after `end_training`."""
        if self.ended:
            _ended()

    def __reduce__(self) -> NoReturn:
        raise AccelError(
            "a run (and its Accelerator) lives in one process and cannot be pickled; something sent to"
            " another process holds it, such as a dataset or collate function of DataLoader workers\n"
            "pass accelerator.process_index or accelerator.run.config instead"
        )

    # -- its mesh ---------------------------------------------------------------------------------

    def _mesh_of(self, hooks: Hooks) -> Mesh | None:
        mesh: Mesh | None = hooks.build_mesh(hooks.mesh_dims(self.config, self.world), self.world)
        return mesh

    def _topology_over(self, mesh: Mesh | None) -> Topology:
        """Return the division of data and losses over ranks; without a mesh each rank reads."""
        return mesh.topology() if mesh else Topology(reader=self.world.rank, readers=self.world.size)

    def _mesh_for(self, alias: str, hooks: Hooks) -> Mesh | None:
        """Return a unit's mesh: its strategy's mesh, over the data that the run reads."""
        if alias == self.stack.default:
            return self.mesh
        if alias not in self._meshes:
            mesh = self._meshes[alias] = self._mesh_of(hooks)
            theirs, ours = self._topology_over(mesh), self.topology
            if mesh is not None and (theirs.reader, theirs.readers) != (ours.reader, ours.readers):
                raise ConfigError(
                    f"strategy {alias!r} wants rank {self.world.rank} to be reader {theirs.reader} of"
                    f" {theirs.readers}, but this run, by {self.stack.default!r}, reads as {ours.reader} of"
                    f" {ours.readers}\ngive both the same dimensions that split the model, such as tp and pp"
                )
        return self._meshes[alias]


def _require_new(name: Any, taken: Collection[str]) -> None:
    if name in taken:
        raise ConfigError(f"this run already has a unit {name!r}\ngive the new one another name")


def _ended(*_: object) -> NoReturn:
    raise AccelError("this run has ended (end_training was called)\nmake a new Accelerator for a new run")


def _forgotten(*_: object) -> NoReturn:
    raise AccelError(
        "this optimizer is of before free_memory, and its unit is gone\n"
        "prepare it again with its model, and use what accelerator.prepare(...) returns"
    )


def _release(unit: Unit) -> None:
    try:
        unit.hooks.release(unit)
    finally:
        while unit.detach:
            unit.detach.pop()()


atexit.register(end_runs)
