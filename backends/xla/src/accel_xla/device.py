"""XLA devices.

Torch gives them no module of their own, so each service is torch_xla's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from accel_core import LaunchError, RandomStream, hooks, implements
from accel_xla import machine
from accel_xla.communication import XlaCollectives
from accel_xla.config import XlaConfig
from accel_xla.loading import Uploading
from accel_xla.recompute import recomputed

if TYPE_CHECKING:
    from torch import nn

    from accel_core import Collectives, Run, Topology, Unit, World

__all__ = ["XlaDevice", "environment_report", "verify"]


def verify() -> str | None:
    """None if torch_xla loads for the device that is asked for, else why not.

    Starts no runtime.
    """
    if machine.DEVICE not in os.environ:
        return (
            "no TPU or Neuron device is found here, and XLA's CPU device is used only when named"
            f" (xla.pjrt_device: CPU, or {machine.DEVICE}=CPU)"
        )
    try:
        import torch_xla  # noqa: F401
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"torch_xla does not load: {type(error).__name__}: {error}"
    return None


class XlaDevice:
    """Device `xla`.

    The run has one device; in a world of several, torch_xla must see as many replicas.
    """

    below: Any

    def __init__(self, config: XlaConfig | None, run: Run) -> None:
        import torch_xla
        from torch_xla import runtime
        from torch_xla.core import xla_model

        self.config = config or XlaConfig()
        self.run = run
        self._sync, self._device = torch_xla.sync, torch_xla.device
        self._xm, self._xr = xla_model, runtime
        self._gradients_wait = False

    # -- set-up ----------------------------------------------------------------------------------

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        if not self._xr.is_spmd():
            self._join(world)
        return torch.device(self._device())

    def _join(self, world: World) -> None:
        """Set up torch_xla in a process that torch's own launcher has started."""
        from torch_xla._internal import pjrt

        if world.size == 1:
            pjrt.initialize_singleprocess()  # on a host of several TPU chips, it takes the first
            return
        pjrt.initialize_multiprocess(world.local_rank, world.local_size)
        _require_replicas(world, self._xr.addressable_device_count(), self._xr.world_size())

    @implements(hooks.capabilities)
    def capabilities(self, device: torch.device) -> frozenset[str]:
        able: frozenset[str] = self.below.capabilities(device)
        if self._xr.device_type() != "CPU":
            able -= {"float64"}  # TPUs emulate it by pairs of float32, with fewer digits
        return able if self._reports_memory() else able - {"memory_stats"}

    @implements(hooks.collectives)
    def collectives(self, dim: str) -> Collectives:
        if dim != "world" or self.run.world.size == 1 or self._xr.is_spmd():
            below: Collectives = self.below.collectives(dim)
            return below
        return XlaCollectives(self.run.collectives("control"))

    # -- prepare ---------------------------------------------------------------------------------

    @implements(hooks.place_model)
    def place_model(self, unit: Unit, model: nn.Module, device: torch.device) -> nn.Module:
        tied = list(_tied(model))
        placed: nn.Module = self.below.place_model(unit, model, device)
        for module, name, owner, owners_name in tied:  # moving to XLA makes a new tensor of each name
            setattr(module, name, getattr(owner, owners_name))
        return placed

    @implements(hooks.wrap_dataloader)
    def wrap_dataloader(self, loader: Iterable[Any], topology: Topology) -> Iterable[Any]:
        return Uploading(loader, self.run, self.config.prefetch)

    @implements(hooks.checkpoint_function)
    def checkpoint_function(self, unit: Unit) -> Callable[..., Any]:
        return recomputed

    # -- each step -------------------------------------------------------------------------------

    @implements(hooks.mark_step)
    def mark_step(self, point: str) -> None:
        # Between backward and step the graph goes on: if it ended there, gradients that are then changed
        # in place and read in between (clipping, and its norm) would come out wrong.
        if point == "backward" or (point == "host_read" and self._gradients_wait):
            self._gradients_wait = True
            return
        self._gradients_wait = False
        self._sync()

    # -- state and services ----------------------------------------------------------------------

    @implements(hooks.random_streams)
    def random_streams(self) -> Mapping[str, RandomStream]:
        # The device's generator is one number, which each operation that draws replaces.
        xm = self._xm
        stream = RandomStream(
            lambda: torch.tensor([*xm.get_rng_state().to_bytes(8, "little")], dtype=torch.uint8),
            lambda state: xm.set_rng_state(int.from_bytes(bytes(state.tolist()), "little")),
            lambda seed: xm.set_rng_state(seed % 2**63),
        )
        return {"xla": stream}

    @implements(hooks.memory_stats)
    def memory_stats(self, device: torch.device) -> Mapping[str, int]:
        if not self._reports_memory():
            return {}
        found = self._xm.get_memory_info(device)
        known = {"allocated": "bytes_used", "peak": "peak_bytes_used", "total": "bytes_limit"}
        stats = {key: int(found[name]) for key, name in known.items() if name in found}
        if {"allocated", "total"} <= stats.keys():
            stats["free"] = stats["total"] - stats["allocated"]
        return stats

    def _reports_memory(self) -> bool:
        # Of the device that stands for all under SPMD, torch_xla knows nothing.
        return self._xr.device_type() != "CPU" and not self._xr.is_spmd()


def _require_replicas(world: World, devices: int, replicas: int) -> None:
    """Refuse processes that would silently train alone or hold several devices."""
    if devices != 1:
        raise LaunchError(
            f"this process is given {devices} XLA devices, but it trains on one\n"
            "use strategy: xla-spmd, with which one process drives all of them"
        )
    if replicas != world.size:
        raise LaunchError(
            f"{world.size} processes were started, but torch_xla joins {replicas} of them\n"
            f"start one a device ({machine.DEVICE}={os.environ.get(machine.DEVICE)}); XLA's CPU device"
            " serves one process only"
        )


def _tied(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """Yield (module, name, first module, first name) of each tensor that is an alias."""
    first: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and first.setdefault(id(tensor), (module, name)) != (module, name):
                yield (module, name, *first[id(tensor)])


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def environment_report() -> Mapping[str, str]:
    """Return lines for `accel env`."""
    from torch_xla import runtime

    return {
        "torch_xla": metadata.version("torch_xla"),
        machine.DEVICE: os.environ.get(machine.DEVICE, "unset"),
        "XLA devices": f"{runtime.global_runtime_device_count()} x {runtime.device_type()}",
        "XLA SPMD": "on" if runtime.is_spmd() else "off",
        "libtpu": _version("libtpu"),
    }
