"""One process drives all devices.

XLA's compiler spreads model and batch over them (SPMD).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from accel_core import (
    ConfigError,
    Leaf,
    Mesh,
    MeshDim,
    OptimizerState,
    Topology,
    arrange,
    hooks,
    implements,
    ops,
)
from accel_xla.config import SpmdConfig

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core import Entry, Run, RunConfig, TensorTemplate, Unit, World

__all__ = ["Spmd"]

_DATA = ("dp_replicate", "dp_shard")


class DeviceGrid(Mesh):
    """A mesh over the devices of all processes, each of which reads the whole batch."""

    def topology(self) -> Topology:
        """Return the topology: devices take their parts of a batch, and the loss is global."""
        return Topology(loss_dim="alone", gather_dim="alone")


class Spmd:
    """Strategy `xla-spmd`.

    FSDPv2 on torch_xla's own mesh, which spans the devices, not the processes.

    Each tensor is one object with its global shape; how it lies on the devices is a mark on it, which
    gradients and optimizer state inherit.
    """

    below: Any

    def __init__(self, config: SpmdConfig | None, run: Run) -> None:
        import torch_xla
        from torch_xla import runtime
        from torch_xla.distributed import spmd

        self.config, self.run = config or SpmdConfig(), run
        self._xr, self._xs, self._sync = runtime, spmd, torch_xla.sync
        if torch_xla._XLAC._xla_get_spmd_config_is_locked() and not runtime.is_spmd():
            raise ConfigError(
                "strategy xla-spmd: this process has already used an XLA device without SPMD, and torch_xla"
                " has one mode a process\nmake this Accelerator first, or in a process of its own"
            )
        if not runtime.is_spmd():
            runtime.use_spmd()
        self._held: dict[Unit, dict[str, tuple[Any, list[Any]]]] = {}
        """Sharded tensors whose parts lie on the host; a load writes them back."""

    # -- set-up ----------------------------------------------------------------------------------

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        if self.run.stack.device.name == "xla":
            return []
        return [f"xla-spmd trains on XLA devices, not on {self.run.stack.device.name}; set device: xla"]

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config: RunConfig, world: World) -> Sequence[MeshDim]:
        replicate = config.parallelism.get("dp_replicate", 1)
        shard = config.parallelism.get("dp_shard", 1 if replicate == -1 else -1)
        return [MeshDim("dp_replicate", replicate), MeshDim("dp_shard", shard)]

    @implements(hooks.build_mesh)
    def build_mesh(self, dims: Sequence[MeshDim], world: World) -> Mesh:
        if strange := [dim.name for dim in dims if dim.name not in _DATA]:
            raise ConfigError(
                f"xla-spmd shards parameters and batches along {' and '.join(_DATA)} only, but this stack"
                f" also wants the dimension {', '.join(strange)}\nleave out the extension that does"
            )
        count = self._xr.global_runtime_device_count()
        arranged = arrange(dims, count)
        names, sizes = zip(*[(dim.name, dim.size) for dim in arranged], strict=True)
        return DeviceGrid(arranged, 0, self._xs.Mesh(np.arange(count), sizes, names))

    # -- prepare ---------------------------------------------------------------------------------

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Mark parameters, and the outputs of the model and of classes in `wrap`."""
        for parameter in model.parameters():
            self._shard(unit, parameter)
        wrapped = [module for module in model.modules() if type(module).__name__ in self.config.wrap]
        if missing := set(self.config.wrap) - {type(module).__name__ for module in wrapped}:
            raise ConfigError(
                f"xla-spmd.wrap names {', '.join(sorted(missing))}, of which {type(model).__name__} has no"
                " module\nname classes of its modules, or leave it out"
            )
        for module in (*wrapped, model):
            unit.detach.append(module.register_forward_hook(self._output_of(unit)).remove)
        for module in wrapped:  # else the compiler may fuse the gradients of all layers into one
            self._xs.xla_sharding.apply_backward_optimization_barrier(module)
        return model

    @implements(hooks.place_batch)
    def place_batch(self, unit: Unit | None, batch: Any, device: torch.device) -> Any:
        self._mark_all(unit, batch)
        return batch

    def _mark_all(self, unit: Unit | None, tree: Any) -> None:
        ops.recursively_apply(lambda tensor: self._mark(unit, tensor, _DATA, 0), tree)

    def _output_of(self, unit: Unit) -> Any:
        def mark(module: nn.Module, inputs: Any, output: Any) -> None:
            self._mark_all(unit, output)

        return mark

    def _shard(self, unit: Unit, tensor: Tensor) -> None:
        longest = max(range(tensor.ndim), key=lambda dim: tensor.shape[dim], default=0)
        self._mark(unit, tensor, "dp_shard", longest)

    def _mark(self, unit: Unit | None, tensor: Tensor, axes: Any, dim: int) -> None:
        if tensor.ndim and tensor.numel() and tensor.device.type == "xla":  # what is empty cannot be cut
            mesh = (unit and unit.mesh) or self.run.mesh
            assert mesh is not None
            spec = tuple(axes if each == dim else None for each in range(tensor.ndim))
            self._xs.mark_sharding(tensor, mesh.device_mesh, spec)

    # -- state -----------------------------------------------------------------------------------

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        return self._in_boxes(unit, self.below.model_state(unit))

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit: Unit, optimizer: Optimizer) -> OptimizerState:
        state: OptimizerState = self.below.optimizer_state(unit, optimizer)
        return evolve(state, leaves=self._in_boxes(unit, state.leaves))

    @implements(hooks.materialize_optimizer_state)
    def materialize_optimizer_state(
        self,
        unit: Unit,
        optimizer: Optimizer,
        template: Mapping[str, Mapping[str, TensorTemplate]],
        plain: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.below.materialize_optimizer_state(unit, optimizer, template, plain)
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if getattr(value, "shape", None) == parameter.shape:
                    self._shard(unit, value)

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
        for tensor, shards in self._held.pop(unit, {}).values():
            if shards[0].indices is Ellipsis:
                tensor.global_tensor.copy_(shards[0].data)
                continue
            whole = {_offset(shard): shard.data for shard in reversed(shards)}
            for shard in shards:  # core has filled the first of those that hold the same part
                shard.data.copy_(whole[_offset(shard)])
            tensor.load_local_shards_(shards)

    @implements(hooks.checkpoint_committed)
    def checkpoint_committed(self, folder: Path | str, step: int | None) -> None:
        self._held.clear()

    def _in_boxes(self, unit: Unit, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
        self._sync(wait=True)  # what is recorded, or on its way, has no parts yet
        return {name: self._boxes(unit, name, leaf) for name, leaf in leaves.items()}

    def _boxes(self, unit: Unit, name: str, leaf: Leaf) -> Leaf:
        """Parts of a sharded tensor on this host's devices, each once, as host copies."""
        ((_, data),) = leaf.shards
        tensor = self._xs.wrap_if_sharded(data)
        if tensor is data:
            return leaf
        shards = tensor.local_shards
        self._held.setdefault(unit, {})[name] = tensor, shards
        parts = {_offset(shard): _unpadded(shard) for shard in reversed(shards)}
        boxes = tuple((offset or (0,) * data.ndim, part) for offset, part in parts.items() if part.numel())
        return evolve(leaf, shards=boxes, replicated=self.run.world.size > 1)


def _offset(shard: Any) -> tuple[int, ...]:
    """Offset of a shard's part; empty for one that is whole."""
    return () if shard.indices is Ellipsis else tuple(index.start for index in shard.indices)


def _unpadded(shard: Any) -> Tensor:
    # Not `shard.unpadded_data`: it indexes by a list, which torch is about to read as a tensor of indices.
    part: Tensor = shard.data
    for dim, each in enumerate(() if shard.indices is Ellipsis else shard.indices):
        part = part.narrow(dim, 0, each.stop - each.start)
    return part
