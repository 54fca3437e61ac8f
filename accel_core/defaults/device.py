"""The generic device: any accelerator that torch itself runs, else the CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_core.contract import hooks
from accel_core.contract.hooks import implements
from accel_core.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from accel_core.contract.run import Run
    from accel_core.contract.world import World


AGENT: Final = "TORCHELASTIC_RUN_ID"
"""Variable that torch's elastic agent sets in the processes that it starts."""


class NativeDevice:
    """The device of the type that the config names. The base layer does the rest."""

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        asked = self.run.config.device
        if asked in ("auto", "native"):
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            return local_device(accelerator.type if accelerator else "cpu", world)
        kind, _, index = asked.partition(":")
        if not index:
            return local_device(kind, world)
        if world.size > 1:
            origin = self.run.resolved.origins.get("device", "the config")
            raise ConfigError(
                f"device {asked!r} ({origin}) names one device, but this run has {world.size} processes\n"
                f"write device: {kind}; each process takes the device of its local rank"
            )
        return local_device(kind, world, int(index))


def local_device(kind: str, world: World, index: int | None = None) -> torch.device:
    """Make this process's torch device of type `kind` current, and return it.

    `index` defaults to the local rank, or in a world of one process to the current device.

    Raises:
        LaunchError: this machine has no such device, or fewer devices than processes.
    """
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    if index is None:
        index = _current(module, world)
    count = module.device_count()
    # An engine may show each task its own device only. Workers of an agent all see the same devices.
    if count == 1 and index == world.local_rank and world.is_task and AGENT not in os.environ:
        index = 0
    if index >= count:
        raise LaunchError(
            f"local rank {index} needs {kind}:{index}, but this machine has {count} {kind} device(s)\n"
            f"start at most {count} processes per node, or choose --device cpu"
        )
    if hasattr(module, "set_device"):
        module.set_device(index)
    return torch.device(kind, index)


def _current(module: Any, world: World) -> int:
    is_used = getattr(module, "is_initialized", None)
    if world.size > 1 or world.local_rank or is_used is None or not is_used():
        return world.local_rank
    current: int = getattr(module, "current_device", lambda: 0)()
    return current
