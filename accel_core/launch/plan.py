"""Plan a job from a merged config.

Imports torch only to count devices that no plugin counts. The workers resolve `auto`, not this module, since
this machine may be a login node.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from accel_core.config.resolve import Resolved, load, outside
from accel_core.config.sources import GUESSES_VARIABLE, WORKER_CONFIG_VARIABLE
from accel_core.config.unused import TYPED, auto_may_take, unused_options, unused_sections
from accel_core.contract.job import Job
from accel_core.contract.world import World
from accel_core.errors import ConfigError, LaunchError, PluginError
from accel_core.plugins.discovery import Discovery, discover, environment_of, visible_devices

if TYPE_CHECKING:
    from accel_core.contract.bound import Hooks
    from accel_core.contract.config import RunConfig
    from accel_core.contract.job import Allocation
    from accel_core.plugins.discovery import Record

NATIVE: Final = "torchrun"
"""Name of the launcher below all other launchers."""
PORTS: Final = range(20_000, 32_000)
"""Ports below the range from which systems assign ports by themselves."""


def plan(**given: Any) -> Launch:
    """Return the launch of the config that `resolve.load` merges.

    Raises:
        ConfigError: the settings are wrong, or name plugins that are not installed.
    """
    discovery = discover()
    resolved = load(**given, discovery=discovery, environment=outside())
    if problems := resolved.unknown_plugins():
        raise ConfigError("\n".join(problems), problems=problems)
    return Launch(resolved, discovery)


@frozen
class Launch:
    """A launch before its workers exist: config, processes, environment."""

    resolved: Resolved
    discovery: Discovery
    allocation: Allocation | None = None
    """The machines that an engine has given to this process."""

    @property
    def config(self) -> RunConfig:
        """The merged config, with `auto` unresolved."""
        return self.resolved.config

    def allocated(self) -> Launch:
        """Return this launch with the machines that its launcher's engine has given.

        `launcher: auto` becomes the first launcher that has an allocation, else torchrun.
        """
        section = self.config.launch
        # A launch inside a rank is not the engine's job, and uses this machine alone.
        is_rank = {"RANK", "WORLD_SIZE"} <= os.environ.keys()  # batch scripts export WORLD_SIZE alone
        cards = [card.name for card, _ in self.discovery.usable("launcher") if card.priority]
        for name in [*cards, NATIVE] if section.launcher == "auto" else [section.launcher]:
            found = self._with(launcher=name)
            allocation = None if is_rank else found.launcher().allocation(self.config.launch)
            if allocation is not None:
                break
        else:
            return found
        asked = self.resolved.settings.get(("launch", "nodes"))
        if asked and section.nodes == 1 < allocation.nodes and not allocation.processes_per_node:
            raise LaunchError(
                f"1 node was asked for ({asked.origin}), but launcher {name} has an allocation of"
                f" {allocation.nodes}\nleave launch.nodes out, or use this node alone by --launcher {NATIVE}"
            )
        settled: dict[str, Any] = {"nodes": allocation.nodes, "node_rank": allocation.node_rank}
        if allocation.processes_per_node:
            settled["processes_per_node"] = allocation.processes_per_node
        return evolve(found._with(**settled), allocation=allocation)

    def _with(self, **options: Any) -> Launch:
        """Return this launch with other options of section `launch`."""
        config = evolve(self.config, launch=evolve(self.config.launch, **options))
        return evolve(self, resolved=evolve(self.resolved, config=config))

    def line(self, processes: int | str) -> str:
        """Return one line that describes the launch.

        The line has only settings that were set, since the script may still choose the others.
        """
        from accel_core._version import __version__

        config, launch = self.config, self.config.launch
        count = f"{processes} process{'' if processes == 1 else 'es'}"
        if launch.nodes > 1:
            total = launch.nodes * processes if isinstance(processes, int) else "auto"
            each = "tasks" if self.allocation and self.allocation.processes_per_node else "nodes"
            count = f"{launch.nodes} {each} x {processes} = {total} processes"
            count += f", at least {launch.min_nodes} nodes" if launch.min_nodes else ""
        given = [name for name in ("device", "strategy", "mixed_precision") if name in self.resolved.origins]
        stack = [f"{name.replace('_', ' ')} {getattr(config, name)}" for name in given]
        stack += [f"extension {name}" for name in config.extensions]
        file = f"config {self.resolved.file}" if self.resolved.file else "no config file"
        return f"accel {'.'.join(__version__.split('.')[:2])}: {', '.join([count, *stack, file])}"

    def option_notes(self) -> Iterator[str]:
        """Yield a note on each option that has no effect, unless the script chooses more plugins."""
        named = self.config.plugin_names()
        answers = (record.name for _, slot, name in named for record in self.discovery.answering(slot, name))
        used = {self.config.device, *answers}
        for record, given, setting in unused_sections(self.resolved, used, self.discovery):
            if not auto_may_take(record, self.resolved):
                about = f"{given.origin}: {record.slot} {record.name} is not in this config"
                effect = (
                    "a run refuses its options" if given.origin.source in TYPED else "its options do nothing"
                )
                yield f"{about}: {effect}; `{setting}` chooses it"
        yield from unused_options(self.resolved, used)

    def hardware(self) -> str:
        """Return text that describes the devices that `device: auto` means on this machine."""
        record, count = self._device(), self._visible()
        if count is None:
            return "torch is not installed here, so only the workers know their devices"
        if not count:
            return "no accelerator; runs use the CPU"
        return (
            f"{count} x {'torch.accelerator' if record is None or record.name == 'native' else record.name}"
        )

    def processes(self) -> int:
        """Return the number of workers on each node: the configured number, or the number of visible devices.

        0 if the launcher counts devices on other machines.

        Raises:
            LaunchError: the number of workers is higher than the configured device can serve.
        """
        asked, on_cpu = self.config.launch.processes_per_node, self.config.device.partition(":")[0] == "cpu"
        elsewhere = self.allocation is not None and self.allocation.elsewhere
        if asked == "auto":
            return 1 if on_cpu else 0 if elsewhere else self._visible() or 1
        if self.config.device != "auto" and not on_cpu and not elsewhere:
            self._refuse_too_many(asked)
        return asked

    def _refuse_too_many(self, asked: int) -> None:
        device, record = self.config.device, self._device()
        if asked > 1 and record and record.card and "process_per_device" not in record.card.offers:
            raise LaunchError(
                f"{asked} processes were asked for; {device} trains in one\nuse -n 1, or --device cpu"
            )
        visible = self._visible()
        if visible is not None and asked > visible:
            raise LaunchError(
                f"{asked} processes per node were asked for;"
                f" this machine shows {visible} {device} device(s)\n"
                f"use -n {visible or 1}, or -n auto, or --device cpu"
            )

    def environment(self, processes: int) -> dict[str, str]:
        """Return the run ID and plugins' variables for vendor libraries, unless the user has set them."""
        launch = self.config.launch
        world = World(size=launch.nodes * processes, local_size=processes, nodes=launch.nodes)
        # The rendezvous is all that the launchers of a job have in common, so the run ID is made from it.
        meeting = f"{launch.rendezvous}/{launch.nodes}".encode() if launch.nodes > 1 else os.urandom(16)
        run_id = hashlib.blake2b(meeting, digest_size=16).hexdigest()
        wanted = {"ACCEL_RUN_ID": self.allocation.job_id if self.allocation else run_id}
        # A worker that launches a job has inherited the ID of its own job, which the new job must not use.
        inherited = {"ACCEL_RUN_ID"} if WORKER_CONFIG_VARIABLE in os.environ else set()
        for record in self._named():
            wanted.update(environment_of(record, self.config, world))
        yours = os.environ.keys() - inherited
        new = {name: value for name, value in wanted.items() if name not in yours}
        return {**new, GUESSES_VARIABLE: json.dumps(new)}

    def job(self, argv: Sequence[str], processes: int, command: Sequence[str] = ()) -> Job:
        """Return the job, whose environment passes the merged config to workers."""
        launch, allocation = self.config.launch, self.allocation
        place = None
        if allocation and launch.nodes > 1:
            # All nodes must derive the same port, and the name of the job is all that they have in common.
            port = PORTS[zlib.crc32(allocation.job_id.encode()) % len(PORTS)]
            place = f"{allocation.address}:{port}"
        if (launch.log_dir or launch.tee != "none") and not self.launcher_offers("worker_output"):
            raise LaunchError(
                f"launch.log_dir and launch.tee: launcher {launch.launcher} does not handle the output of"
                " workers\nleave them out, and use the options of that launcher"
            )
        return Job(
            argv=tuple(argv),
            command=tuple(command),
            id=allocation.job_id if allocation else "",
            nodes=launch.nodes,
            node_rank=launch.node_rank,
            processes_per_node=processes,
            rendezvous=launch.rendezvous or place,
            max_restarts=launch.max_restarts,
            min_nodes=launch.min_nodes,
            log_dir=launch.log_dir,
            tee=launch.tee,
            environment={
                **self.environment(processes),
                WORKER_CONFIG_VARIABLE: self.resolved.worker_config(),
            },
        )

    def launcher_offers(self, word: str) -> bool:
        """Return True if the launcher's card offers a word of `CAPABILITIES`."""
        record = self._launcher()
        return record is not None and record.card is not None and word in record.card.offers

    def launcher(self) -> Hooks:
        """Return the hooks of the config's launcher plugin, above the hooks of torchrun."""
        record = self._launcher()
        assert record is not None
        if record.card is None or record.status != "available":
            about = f"launcher {record.name} cannot be used: {record.reason}"
            raise PluginError(
                f"{about}\n`accel plugins doctor {record.name}` looks closer; `accel plugins` lists others",
                plugin=record.name,
            )
        from accel_core.launch.launcher import TorchrunLauncher
        from accel_core.plugins.manager import PluginManager

        manager = PluginManager()
        manager.add_plugin(TorchrunLauncher(), name=NATIVE, slot="base")
        if record.name != NATIVE:
            plugin = record.implementation(self.resolved.plugin_config(record), None)
            plugin.below = manager.hooks_of([NATIVE])
            manager.add_plugin(plugin, name=record.name, slot="launcher", origin=record.origin)
        return manager.hooks_of([NATIVE, record.name])

    def _launcher(self) -> Record | None:
        name = self.config.launch.launcher
        return self.discovery.get(NATIVE if name == "auto" else name)

    # -- which devices are here ------------------------------------------------------------------

    def _visible(self) -> int | None:
        """Return the number of visible devices of the configured type; None if nothing can count them."""
        record = self._device()
        count = visible_devices(record, self.config) if record else None
        return _count_by_torch(self.config.device) if count is None else count

    def _device(self) -> Record | None:
        """Return the configured device plugin; for `auto`, the plugin that would be chosen here."""
        if self.config.device != "auto":
            record = self.discovery.get(self.config.device.partition(":")[0])
            return record if record and record.slot == "device" else None
        return next((record for _, record in self.discovery.usable("device")), None)

    def _named(self) -> list[Record]:
        """Return the installed plugins that this config names, with the device plugin for `auto`."""
        names = [self.config.strategy, self.config.mixed_precision, *self.config.extensions]
        records = [self._device(), *map(self.discovery.get, names)]
        return [record for record in records if record is not None]


def _count_by_torch(device: str) -> int | None:
    try:
        import torch

        module = torch.accelerator if device == "auto" else torch.get_device_module(device.partition(":")[0])
        return int(module.device_count())
    except (ImportError, RuntimeError, AttributeError):
        return None  # torch is not installed, or does not know the device: the worker reports the reason
