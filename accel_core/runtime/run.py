"""A run: everything that one `Accelerator` owns, from its config to its units.

A run is not global: several, with different stacks, may live in one process. What is global to
the process (torch's process group) is shared between them and counted.
"""

from __future__ import annotations

import atexit
import os
import traceback
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NoReturn

from attrs import evolve

from accel_core.checkpoint.session import CheckpointSession
from accel_core.contract.bound import Hooks, Steps
from accel_core.contract.prepared import PreparedObjects
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
"""Seconds that a process that failed waits for its last save."""


class Run:
    """Config, stack, device, world and units of one `Accelerator`.

    Building one is collective: all ranks of the world must.

    Raises:
        ConfigError: what was asked cannot be, or differs between ranks.
        PluginError: a chosen plugin cannot be used.
        LaunchError: the process group cannot be made.
    """

    run_id: str
    plugins: Mapping[str, object]
    configs: Mapping[str, object]
    cards: Mapping[str, Card]
    mesh: Mesh | None = None
    group: ProcessGroup | None = None
    """The process group that it uses."""
    ended: bool = True
    """Also of a run that could not be made."""

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
        """The windows of the innermost `accumulate`, or of the one entered last."""
        self._no_window = Window()
        self.accumulation: Accumulation | None = None
        """The innermost `accumulate` that is entered."""
        self.active_loaders: list[PreparedLoader] = []
        self.registered: list[Any] = []
        self.unsaved_models: list[nn.Module] = []
        """Prepared models whose weights are in no saved state: their program keeps them."""
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
        """Micro-batches of the windows of units made from now on."""
        self.checkpoints = CheckpointSession(self)
        self.stop_signals = StopSignals(self)
        self.environment: list[str] = []
        self.ended = False
        try:
            self.environment_notes = apply_launch_environment(self)
            self._join(trackers)
        except BaseException:  # a plugin may raise anything, and the caller may make another run
            self.ended = True
            self._leave_world()
            restore_environment(self)
            raise

    def _join(self, trackers: Sequence[GeneralTracker]) -> None:
        """Plugins, the device and the process group."""
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
            tell("".join(f"accel: {note}\n" for note in notes))
        self.hooks.run_started(self.run_id, self.config)
        live_runs.add(self)

    def __del__(self) -> None:
        # Nobody can end this run any more, but its threads and its process group are there.
        if not self.ended:
            live_runs.discard(self)
            self.prepared, self.accumulation = PreparedObjects(), None
            self.registered, self.unsaved_models, self.active_loaders = [], [], []
            self.checkpoints.free_memory()
            end_at_exit(self)

    # -- what others ask -------------------------------------------------------------------------

    @property
    def units(self) -> list[Unit]:
        """The units of what is prepared."""
        return self.prepared.units

    @property
    def window(self) -> Window:
        """The innermost current window, or the one used last."""
        return self.windows[-1] if self.windows else self._no_window

    @property
    def communication_backends(self) -> Mapping[str, str]:
        """Torch device type -> torch.distributed backend, of the run's device and the CPU."""
        return backends_of(self)

    def set_accumulation_steps(self, steps: int, *, inside: bool = False) -> None:
        """Set the micro-batches per window: of every unit, from its next window on.

        inside: of the windows that are entered as well.
        """
        self.accumulation_steps = steps
        for window in {self.window, *(unit.window for unit in self.units)}:
            window.resize(steps, current=inside or (self.accumulation is None and window.boundary))

    def drop_accumulations(self) -> None:
        """End every `accumulate`: Ctrl-C may have kept one from ending."""
        while self.accumulation is not None:
            self.accumulation.drop()

    def collectives(self, dim: str = "world") -> Collectives:
        """Return collectives over a dimension. The first call for one is collective."""
        if dim not in self._dims:
            self.require_alive()
            self._dims[dim] = self.hooks.collectives(dim)
        return self._dims[dim]

    def make_unit(self, name: str | None, strategy: str | None, made: Sequence[Unit] = ()) -> Unit:
        """Return a unit without objects, its strategy's hooks resolved.

        made: other units that the run does not have yet.
        """
        from accel_core.training.step_state import StepState  # late: start-up need not wait for it

        alias = strategy or self.stack.default
        taken = {unit.name for unit in (*self.units, *made)}
        name = name or next(free for number in count() if (free := f"unit{number}") not in taken)
        _require_new(name, taken)
        hooks = self.hooks_of(alias)
        steps, owner = Steps(hooks), hooks.implementations("backward")[-1].plugin
        return Unit(
            name=name,
            run=self,
            strategy=alias,
            plugin=self.plugins[alias],
            strategy_owns_backward=owner == alias,
            hooks=hooks,
            steps=steps,
            window=Window(self.accumulation_steps),
            step_state=StepState.of(steps, self.mark_step, reduces=self.world.size > 1),
            mesh=self._mesh_for(alias, hooks),
        )

    def hooks_of(self, strategy: str | None, name: str | None = None) -> Hooks:
        """Return a strategy's hooks, for a unit that is made later.

        strategy: an alias; None stands for the run's default. name: of that unit, which must be new.
        """
        _require_new(name, {unit.name for unit in self.units})
        alias = strategy or self.stack.default
        hooks = self._assembly.hooks_of(alias)
        if alias != self.stack.default:
            check_capabilities(self, hooks, alias)
        return hooks

    def reconfigure(self, **changes: Any) -> None:
        """Change the config from now on: of steps and of objects prepared later."""
        self.config = evolve(self.config, **changes)
        self.prepared.renew_trained()  # each `accumulate` that was made before reads the config anew

    def use_device(self, device: torch.device) -> None:
        """Put what is prepared from now on onto this device."""
        self.device = device

    def use_strategy(self, alias: str) -> None:
        """Have later calls of `prepare` that name no strategy use this one."""
        self.stack = evolve(self.stack, default=alias)

    def exclude_from_checkpoints(self, models: Iterable[nn.Module]) -> None:
        """Leave the weights of exactly these prepared models out of saved states."""
        self.unsaved_models = list(models)

    def end(self, *, failed: bool = False) -> None:
        """Release units and process group; the run cannot be used afterwards. Idempotent.

        Waits for a save that is under way. After a failure other ranks may be gone: the wait is then short,
        and the process group is kept.

        Raises:
            CheckpointError: that save failed. The last error is raised, after all has been released; the
                errors before it are its context.
        """
        if self.ended:
            return
        self.stop_signals.hear()
        finished = self.trackers.names if self.trackers.has_finished else ()
        observers = [each for each in self.hooks.implementations("run_ended") if each.plugin not in finished]
        with ExitStack() as closing:  # makes each call, the last one first, whatever others raise
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
            except KeyboardInterrupt:  # ends the wait only: the run and its save are still there
                closing.pop_all()
                raise

    def _close(self, observer: Implementation) -> None:
        """Let a plugin close what is open. A tracker that cannot does not fail a training that is done."""
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
        """Let each plugin drop what binds units to devices and groups.

        No unit is in a step any more afterwards. The end of the run has done so already.
        """
        self.drop_accumulations()
        for unit in () if self.ended else self.units:
            _release(unit)
        self.windows = ()
        self.prepared.refuse_steps(_forgotten)

    def _leave_world(self) -> None:
        """Drop what holds the process group, which its last user ends."""
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
        """Return a unit's mesh: that of its strategy, over the data that the run reads."""
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
