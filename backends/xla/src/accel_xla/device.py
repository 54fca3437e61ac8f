"""Device plugin `xla`. torch has no device module for XLA, so every hook calls torch_xla."""

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
    """Return the reason why torch_xla cannot be loaded for the selected device; None if it can.

    Does not start XLA's runtime.
    """
    if machine.DEVICE not in os.environ:
        return (
            "this machine has no TPU and no Neuron device, and XLA's CPU device is used only if named"
            f" (xla.pjrt_device: CPU, or {machine.DEVICE}=CPU)"
        )
    try:
        import torch_xla  # noqa: F401
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"torch_xla does not load: {type(error).__name__}: {error}"
    return None


class XlaDevice:
    """Device `xla`. Each process has one device, and torch_xla must see as many replicas as processes."""

    below: Any

    def __init__(self, config: XlaConfig | None, run: Run) -> None:
        import torch_xla
        from torch_xla import runtime
        from torch_xla.core import xla_model

        self.config = config or XlaConfig()
        self.run = run
        self._sync, self._device = torch_xla.sync, torch_xla.device
        self._xm, self._xr = xla_model, runtime
        self._is_before_step = False
        """True from a backward to the optimizer's step."""

    # -- set-up ----------------------------------------------------------------------------------

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        if not self._xr.is_spmd():
            self._join(world)
        return torch.device(self._device())

    def _join(self, world: World) -> None:
        """Initialize torch_xla in a process that accel launch or torchrun has started."""
        from torch_xla._internal import pjrt

        if world.size == 1:
            pjrt.initialize_singleprocess()  # uses the first chip of a host
            return
        pjrt.initialize_multiprocess(world.local_rank, world.local_size)
        _require_replicas(world, self._xr.addressable_device_count(), self._xr.world_size())

    @implements(hooks.capabilities)
    def capabilities(self, device: torch.device) -> frozenset[str]:
        capabilities: frozenset[str] = self.below.capabilities(device)
        if self._xr.device_type() != "CPU":
            capabilities -= {"float64"}  # TPUs emulate it by two float32 values, with fewer digits
        return capabilities if self._reports_memory() else capabilities - {"memory_stats"}

    @implements(hooks.collectives)
    def collectives(self, dim: str) -> Collectives:
        if dim != "world" or self.run.world.size == 1 or self._xr.is_spmd():
            below: Collectives = self.below.collectives(dim)
            return below
        return XlaCollectives(self.run.collectives("control"))

    # -- prepare ---------------------------------------------------------------------------------

    @implements(hooks.place_model)
    def place_model(self, unit: Unit, model: nn.Module, device: torch.device) -> nn.Module:
        aliases = list(_find_aliases(model))
        placed: nn.Module = self.below.place_model(unit, model, device)
        # Moving a model to XLA makes a new tensor for each name, which breaks ties.
        for module, name, owner, owners_name in aliases:
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
        # No graph ends between backward and step. If one did, gradients that are later changed in place and
        # read (by clipping, which reads its norm) would have wrong values: a fault of torch_xla 2.9.
        if point == "backward" or (point == "host_read" and self._is_before_step):
            self._is_before_step = True
            return
        self._is_before_step = False
        self._sync()

    # -- state and services ----------------------------------------------------------------------

    @implements(hooks.random_streams)
    def random_streams(self) -> Mapping[str, RandomStream]:
        # The state of the device's generator is one integer.
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
        info = self._xm.get_memory_info(device)
        names = {"allocated": "bytes_used", "peak": "peak_bytes_used", "total": "bytes_limit"}
        stats = {key: int(info[name]) for key, name in names.items() if name in info}
        if {"allocated", "total"} <= stats.keys():
            stats["free"] = stats["total"] - stats["allocated"]
        return stats

    def _reports_memory(self) -> bool:
        # torch_xla has no figures for the virtual device of SPMD.
        return self._xr.device_type() != "CPU" and not self._xr.is_spmd()


def _require_replicas(world: World, devices: int, replicas: int) -> None:
    """Raise LaunchError if this process has several devices or would silently train alone."""
    if devices != 1:
        raise LaunchError(
            f"this process has {devices} XLA devices, but trains on one\n"
            "use strategy: xla-spmd, with which one process drives all of them"
        )
    if replicas != world.size:
        raise LaunchError(
            f"{world.size} processes were started, but torch_xla joins {replicas} of them\n"
            f"start one process per device ({machine.DEVICE}={os.environ.get(machine.DEVICE)}); XLA's CPU"
            " device supports one process"
        )


def _find_aliases(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """Yield (module, name, first module, first name) for each further name of a tensor."""
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
