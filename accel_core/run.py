"""How a config becomes a running stack: what one `Accelerator` owns.

A run is not global: several, with different stacks, may live in one process. What is global to
the process (torch's process group) is shared between them and counted.
"""

from __future__ import annotations

import atexit
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from accel_core.binding import Binder, Hooks, Registered, Steps
from accel_core.config import structure  # noqa: F401  every run structures: loaded before the first, not in it
from accel_core.config.resolve import Resolved, load
from accel_core.errors import AccelError, CheckpointError, ConfigError, PluginError
from accel_core.hookspecs import DUTIES
from accel_core.native.base import Base
from accel_core.native.launcher import refuse_lonely_tasks
from accel_core.native.process_group import shared
from accel_core.plugins import Discovery, discover, near
from accel_core.plugins import load as load_path
from accel_core.prepare import Homes
from accel_core.stack import Chosen, Stack, choose
from accel_core.tracking import Trackers
from accel_core.unit import Unit, Window
from accel_core.world import Collectives, World

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.checkpoint.preemption import Preemption
    from accel_core.checkpoint.save import Saver
    from accel_core.config.schema import RunConfig
    from accel_core.data.loader import PreparedLoader
    from accel_core.mesh import Mesh
    from accel_core.proxies import PreparedOptimizer
    from accel_core.step import Accumulation
    from accel_core.tracking import GeneralTracker

__all__ = ["Run", "current", "live"]

PATIENCE_SECONDS: Final = 60.0
"""How long a process that failed waits for its last save."""

_live: weakref.WeakSet[Run] = weakref.WeakSet()


class Run:
    """Config, stack, device, world and units of one `Accelerator`.

    Building one is collective: all ranks of the world must.

    Raises:
        ConfigError: what was asked cannot be, or differs between ranks.
        PluginError: a chosen plugin cannot be used.
        LaunchError: the process group cannot be made.
    """

    def __init__(
        self,
        *,
        python: Mapping[str, object] | None = None,
        objects: Sequence[object] = (),
        trackers: Sequence[GeneralTracker] = (),
    ) -> None:
        self.ended = False
        self.units: list[Unit] = []
        self.trained: list[Unit] = []
        self.optimizers: list[tuple[Optimizer, PreparedOptimizer]] = []
        self.homes = Homes()
        self.accumulation: Accumulation | None = None
        """The innermost `accumulate` that is entered."""
        self.refuse: Callable[[Unit], None] | None = None
        """While a batch is held that not every reader has: raises where a unit would wait for the others."""
        self.loaders: list[PreparedLoader] = []
        self.active_loaders: list[PreparedLoader] = []
        self.registered: list[Any] = []
        self.saver: Saver | None = None
        """Made by the first save."""
        self.preemption: Preemption | None = None
        """Made by the first `save_on_preemption`."""
        self.world = World.here()
        if self.world.size == 1:
            refuse_lonely_tasks(os.environ)
        discovery = discover()
        self.resolved, self.stack = _decide(python or {}, objects, self.world, discovery)
        self.config: RunConfig = self.resolved.config
        self.accumulation_steps = self.config.accumulation_steps
        """Micro-batches of the windows of units made from now on."""
        self.iteration = self.config.project.iteration
        """How many states were saved, this run's ancestors' included."""
        self.ancestors: Sequence[str] = ()
        """Ids of the runs whose state this one took over, the oldest first."""
        self.kept: dict[int, str] = {}
        """Numbered checkpoints that `total_limit` counts: number -> save id."""
        self._apply_launch_environment()
        self._verify()
        self._load(trackers)
        self.device: torch.device = self.hooks.select_device(self.world)
        self.hooks.set_affinity(self.world)
        self._check_capabilities()
        self._check_streams()
        self.mark_step = self.hooks.step("mark_step")
        self._dims: dict[str, Collectives] = {}
        self._meshes: dict[str, Mesh | None] = {}
        self._join_world()
        self.mesh = self._mesh_of(self.hooks)
        self.topology = self.hooks.data_topology(self.mesh, self.world)
        self.window = Window()
        """The innermost current window, or the one used last."""
        _live.add(self)
        if self.world.rank == 0:
            sys.stderr.writelines(f"accel: {note}\n" for note in self.resolved.notes)
        self.trackers = Trackers(self, [c.name for c in self.stack.trackers] + [t.name for t in trackers])
        self.hooks.run_started(self.run_id, self.config)

    # -- what others ask -------------------------------------------------------------------------

    def collectives(self, dim: str = "world") -> Collectives:
        """Collectives over a dimension, made once. The first call for a dim is collective."""
        if dim not in self._dims:
            self.require_alive()
            self._dims[dim] = self.hooks.collectives(dim)
        return self._dims[dim]

    def make_unit(self, name: str | None, strategy: str | None, made: Sequence[Unit] = ()) -> Unit:
        """A unit without objects, its hooks resolved for its strategy; `made`: others not yet the run's."""
        alias = strategy or self.stack.default
        taken = {unit.name for unit in (*self.units, *made)}
        name = name or next(free for number in count() if (free := f"unit{number}") not in taken)
        if name in taken:
            raise ConfigError(f"this run already has a unit {name!r}; give the new one another name")
        hooks = self._hooks_of(alias)
        self._check_duties(hooks)
        plugin = self.plugins[alias]
        window = Window(self.accumulation_steps)
        return Unit(
            name=name,
            run=self,
            strategy=alias,
            plugin=plugin,
            hooks=hooks,
            steps=Steps(hooks),
            window=window,
            mesh=self._mesh_for(alias, hooks),
        )

    def unit_of_model(self, model: nn.Module) -> Unit | None:
        """The unit of a model, given the user's module or what `prepare` returned for it."""
        for unit in self.units:
            if any(model is known for known in (*unit.wrapped, *unit.models, *unit.given)):
                return unit
        return None

    def proxy_of(self, optimizer: object) -> PreparedOptimizer | None:
        """What `prepare` returned for an optimizer; itself, if it is such a proxy."""
        for given, proxy in self.optimizers:
            if optimizer is given or optimizer is proxy or optimizer is proxy.optimizer:
                return proxy
        return None

    def absorb(self, unit: Unit, other: Unit) -> None:
        """Join two units that an optimizer spans; `other` has none."""
        unit.given += other.given
        unit.models += other.models
        unit.renamed |= other.renamed
        unit.wrapped += other.wrapped
        unit.detach += other.detach
        unit.record_aliases()
        self.units.remove(other)
        for name, parameter in unit.all_names():
            self.homes.add(parameter, unit, name)

    def end(self, *, failed: bool = False) -> None:
        """Release units and process group; the run cannot be used afterwards. Idempotent.

        A save that is under way is waited for; after a failure, when other ranks may be gone, not for
        long, and the process group is left alone.

        Raises:
            CheckpointError: that save failed.
        """
        if self.ended:
            return
        self.ended = True
        self.trained = []
        _live.discard(self)
        try:
            if self.saver is not None:
                self.saver.settle(PATIENCE_SECONDS if failed else None)
        finally:
            if self.preemption is not None:
                self.preemption.end()
            self.hooks.run_ended()
            self.release_units()
            if not failed:
                self._leave_world()

    def release_units(self) -> None:
        """Let each plugin drop what binds units to devices and groups."""
        for unit in self.units:
            unit.hooks.release(unit)
            while unit.detach:
                unit.detach.pop()()

    def require_alive(self) -> None:
        """Raises AccelError after `end_training`."""
        if self.ended:
            raise AccelError(
                "this run has ended (end_training was called)\nmake a new Accelerator for a new run"
            )

    def __reduce__(self) -> NoReturn:
        raise AccelError(
            "a run (and its Accelerator) lives in one process and cannot be pickled; something sent to"
            " another process holds it, such as a dataset or collate function of DataLoader workers\n"
            "pass accelerator.process_index or accelerator.run.config instead"
        )

    # -- set-up ----------------------------------------------------------------------------------

    def _apply_launch_environment(self) -> None:
        """Set what vendor libraries read at import; the user's own settings win, and are noted."""
        self.environment_notes: list[str] = []
        for chosen in self.stack.members():
            if chosen.card.launch is None:
                continue
            light = load_path(chosen.record, chosen.card.launch)()
            if not hasattr(light, "launch_environment"):
                continue
            for name, value in light.launch_environment(self.config, self.world).items():
                if os.environ.setdefault(name, value) != value:
                    self.environment_notes.append(
                        f"{name}={os.environ[name]} is yours; {chosen.name} would have set {value}"
                    )

    def _verify(self) -> None:
        for chosen in self.stack.members():
            if chosen.card.verify is None:
                continue
            reason = load_path(chosen.record, chosen.card.verify)()
            if reason:
                raise PluginError(
                    f"{chosen.record.slot} {chosen.name} ({chosen.why}) cannot be used here: {reason}\n"
                    f"`accel plugins doctor {chosen.name}` looks closer",
                    plugin=chosen.name,
                    distribution=chosen.record.origin,
                )

    def _load(self, trackers: Sequence[GeneralTracker]) -> None:
        self.binder = Binder()
        self.plugins: dict[str, object] = {}
        self.configs: dict[str, object] = {}
        self._lower = [self.binder.register(Base(self), name="base", slot="base")]
        for chosen in (self.stack.device, self.stack.precision):
            self._lower.append(self._instance(chosen, chosen.name))
        self._strategies: dict[str, Registered] = {}
        self._upper = [self._instance(c, c.name) for c in (*self.stack.extensions, *self.stack.trackers)]
        self._upper += [self._guest(tracker) for tracker in trackers]
        self.hooks: Hooks = self._hooks_of(self.stack.default)
        reasons = self.hooks.refuse(self.config)
        if reasons:
            raise ConfigError(
                f"the stack {self.stack} refuses this config\n" + "\n".join(reasons), problems=reasons
            )

    def _instance(self, chosen: Chosen, alias: str) -> Registered:
        card, record = chosen.card, chosen.record
        if card.implementation is None:
            raise PluginError(
                f"the card of {record.slot} {chosen.name!r} names no implementation", plugin=chosen.name
            )
        config = self.resolved.plugin_config(record, alias if alias in self.config.strategies else None)
        self.configs[alias] = config
        plugin = load_path(record, card.implementation)(config, self)
        registered = self.binder.register(plugin, name=alias, slot=record.slot, origin=record.origin)
        try:
            plugin.below = self.binder.hooks([low for low in self._lower if low.layer < registered.layer])
        except AttributeError as error:
            raise PluginError(
                f"{record.slot} plugin {chosen.name!r} ({record.origin}): {type(plugin).__name__} cannot take"
                " the attribute `below`, which every plugin gets\ndeclare `below: Hooks` in it, not frozen",
                plugin=chosen.name,
                distribution=record.origin,
            ) from error
        self.plugins[alias] = plugin
        return registered

    def _guest(self, tracker: GeneralTracker) -> Registered:
        """A tracker of the user's own, which no package provides."""
        if tracker.name in self.plugins:
            raise ConfigError(
                f"log_with: a {type(tracker).__name__} is called {tracker.name!r}, as a plugin of this run\n"
                "give it another `name`"
            )
        self.plugins[tracker.name] = tracker
        return self.binder.register(tracker, name=tracker.name, slot="tracker", origin="log_with")

    def _hooks_of(self, alias: str) -> Hooks:
        """The hooks with strategy `alias`, which is made on first use: one instance a (plugin, config)."""
        if alias not in self._strategies:
            chosen = self.stack.strategies.get(alias) or self._late_strategy(alias)
            self._strategies[alias] = self._instance(chosen, alias)
        return self.binder.hooks([*self._lower, self._strategies[alias], *self._upper])

    def _check_duties(self, hooks: Hooks) -> None:
        """Hooks override each other by layer; a duty has one owner."""
        owner: dict[str, str] = {}
        for claim in hooks.implementations("owns"):
            for duty in claim.call(self.config):
                if duty not in DUTIES:
                    raise PluginError(
                        f"{claim.plugin}: unknown duty {duty!r}{near(duty, DUTIES)}", plugin=claim.plugin
                    )
                if duty in owner:
                    rivals = " and ".join(self._reason(name) for name in (owner[duty], claim.plugin))
                    raise ConfigError(
                        f"two plugins of this stack want to do {duty}: {rivals}\n"
                        f"leave one of them out, or configure it so that it does not own {duty}"
                    )
                owner[duty] = claim.plugin

    def _reason(self, name: str) -> str:
        why = next((c.why for c in self.stack.members() if c.name == name), "chosen in prepare")
        lines = [
            f"{path} by {origin}" for path, origin in self.resolved.origins.items() if name in path.split(".")
        ]
        return f"{name} ({'; '.join([why, *lines])})"

    def _late_strategy(self, alias: str) -> Chosen:
        record = discover().get(alias)
        if record is None or record.slot != "strategy" or record.status != "available":
            known = ", ".join(self.stack.strategies)
            raise ConfigError(
                f"prepare(strategy={alias!r}): no such strategy; this run has {known}\n"
                "name it under strategies: in the config, or use an installed plugin's name (accel plugins)"
            )
        return Chosen(record, "asked for in prepare")

    def _check_capabilities(self) -> None:
        able = self.hooks.capabilities(self.device)
        device_words = self.stack.device.card.offers
        for chosen in self.stack.members():
            lacking = (chosen.card.needs & device_words) - able
            if lacking:
                raise ConfigError(
                    f"{chosen.record.slot} {chosen.name} ({chosen.why}) needs {', '.join(sorted(lacking))},"
                    f" which {self.device} cannot do\nchoose another {chosen.record.slot}, or another device"
                )

    def _check_streams(self) -> None:
        for stream in self.config.rng_types:
            if stream != "generator" and stream not in (streams := self.hooks.rng_state()):
                known = ["generator", *sorted(streams)]
                origin = self.resolved.origins.get("rng_types", "default")
                raise ConfigError(
                    f"rng_types: there is no random stream {stream!r} ({origin}) on {self.device}"
                    f"{near(stream, known)}\nchoose among {', '.join(known)}"
                )

    # -- the world -------------------------------------------------------------------------------

    def _join_world(self) -> None:
        self.run_id = self.world.run_id or uuid.uuid4().hex
        if self.world.size == 1:
            return
        asked = self.config.process_group.backend
        # Who names a backend is not refused for lack of the device's own.
        backends = dict({self.device.type: asked} if asked else self.hooks.communication_backend(self.device))
        backends.setdefault("cpu", dist.Backend.default_device_backend_map["cpu"])
        if dist.is_initialized():
            self._check_group(backends)
        options = self.config.process_group
        shared.join(lambda: bool(self.hooks.init_process_group(self.world, backends, options)))
        store = _get_default_store()
        prefix = f"accel/{self.world.run_id}/{self.world.restart_count}"
        self.world = evolve(self.world, store=PrefixStore(prefix, store.clone()))  # type: ignore[attr-defined]  # torch's stub lacks it
        try:
            self._compare_ranks()
        except ConfigError:
            self._leave_world()
            raise

    def _mesh_of(self, hooks: Hooks) -> Mesh | None:
        mesh: Mesh | None = hooks.build_mesh(hooks.mesh_dims(self.config, self.world), self.world)
        return mesh

    def _mesh_for(self, alias: str, hooks: Hooks) -> Mesh | None:
        """The mesh of a unit: that of its strategy's stack, over the data that the run reads."""
        if alias == self.stack.default:
            return self.mesh
        if alias not in self._meshes:
            mesh = self._meshes[alias] = self._mesh_of(hooks)
            theirs, ours = hooks.data_topology(mesh, self.world), self.topology
            if mesh is not None and (theirs.reader, theirs.readers) != (ours.reader, ours.readers):
                raise ConfigError(
                    f"strategy {alias!r} wants rank {self.world.rank} to be reader {theirs.reader} of"
                    f" {theirs.readers}, but this run, by {self.stack.default!r}, reads as {ours.reader} of"
                    f" {ours.readers}\ngive both the same dimensions that split the model, such as tp and pp"
                )
        return self._meshes[alias]

    def _check_group(self, backends: Mapping[str, str]) -> None:
        """A group that this process already has must carry this run's tensors too."""
        kind = self.device.type
        found = dist.get_backend_config(dist.group.WORLD)
        if f"{kind}:{backends[kind]}" not in found.split(","):
            raise ConfigError(
                f"this process already has a process group ({found}) that does not carry {kind} tensors by"
                f" {backends[kind]}, as this run needs\n"
                f"make that group with backend '{kind}:{backends[kind]}', or end the run that uses it first"
            )

    def _compare_ranks(self) -> None:
        """Refuse a world whose ranks chose or were given different things; agree on the run's id."""
        control = self.collectives("control")
        mine = (self.run_id, str(self.stack), self.resolved.digest())
        ranks = control.all_gather_object(mine)
        self.run_id = self.world.run_id or ranks[0][0]
        if len({rank[1:] for rank in ranks}) == 1:
            return
        stacks = [rank[1] for rank in ranks]
        if len(set(stacks)) > 1:
            different, found = "stack", stacks
        else:
            trees = control.all_gather_object(self.resolved.tree)
            different = _first_difference(trees)
            found = [repr(_at(tree, different)) for tree in trees]
        listed = "; ".join(f"rank {number}: {value}" for number, value in enumerate(found))
        raise ConfigError(
            f"the ranks of this world do not agree on {different}: {listed}\n"
            "start all nodes with the same config, packages and Accelerator(...) arguments"
        )

    def _leave_world(self) -> None:
        if self.world.size > 1:
            self._dims.clear()
            self._meshes.clear()
            shared.leave(self.hooks.destroy_process_group)


def live() -> list[Run]:
    """The runs of this process that have not ended."""
    return list(_live)


def current() -> Run:
    """The only live run.

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


def _decide(
    python: Mapping[str, object], objects: Sequence[object], world: World, discovery: Discovery
) -> tuple[Resolved, Stack]:
    resolved = load(python=python, objects=objects, discovery=discovery)
    stack = choose(resolved, world.size, discovery)
    return resolved.with_proposals([chosen.name for chosen in stack.members()], discovery), stack


def _first_difference(trees: Sequence[Mapping[str, Any]]) -> str:
    paths = sorted({path for tree in trees for path in _paths(tree)})
    return next(path for path in paths if len({repr(_at(tree, path)) for tree in trees}) > 1)


def _paths(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found += _paths(value, f"{path}.") if isinstance(value, Mapping) else [path]
    return found


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


@atexit.register
def _release_at_exit() -> None:
    # A wrapped model or a process group that is alive when the interpreter ends aborts the process
    # now and then (in torch's threads); a script that never calls end_training must exit cleanly too.
    # After an exception the group is left alone: ending it might wait for ranks that never come.
    failed = getattr(sys, "last_value", None) is not None
    lost = False
    for run in list(_live):
        try:
            run.end(failed=failed)
        except CheckpointError as error:
            sys.stderr.write(f"accel: {error}\n")
            lost = True
    if lost:  # raised here it would be printed and forgotten: the job would count as done
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
