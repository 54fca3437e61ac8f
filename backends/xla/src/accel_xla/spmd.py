"""Strategy `xla-spmd`: one process drives all devices; XLA's compiler partitions model and batch (SPMD)."""

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
    """A mesh over the devices of all processes; each process reads the whole batch."""

    def topology(self) -> Topology:
        """Return a topology without data-parallel ranks: the devices divide the batch; the loss is global."""
        return Topology(loss_dim="alone", gather_dim="alone")


class Spmd:
    """Strategy `xla-spmd`: FSDPv2 on torch_xla's mesh, whose elements are devices instead of processes.

    Each tensor is one object with its global shape. A sharding annotation on the tensor says how it is
    divided among the devices; gradients and optimizer state inherit the annotation.
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
                " has one mode per process\nmake this Accelerator first, or in another process"
            )
        if not runtime.is_spmd():
            runtime.use_spmd()
        self._host_copies: dict[Unit, dict[str, tuple[Any, list[Any]]]] = {}
        """Sharded tensors with host copies of their local shards; a load writes the copies back."""

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
        if others := [dim.name for dim in dims if dim.name not in _DATA]:
            raise ConfigError(
                f"xla-spmd shards parameters and batches along {' and '.join(_DATA)} only, but this stack"
                f" also has the dimension {', '.join(others)}\nleave out the extension that declares it"
            )
        count = self._xr.global_runtime_device_count()
        mesh_dims = arrange(dims, count)
        names, sizes = zip(*[(dim.name, dim.size) for dim in mesh_dims], strict=True)
        return DeviceGrid(mesh_dims, 0, self._xs.Mesh(np.arange(count), sizes, names))

    # -- prepare ---------------------------------------------------------------------------------

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Annotate the parameters, and the outputs of the model and of the classes in `wrap`."""
        for parameter in model.parameters():
            self._shard(unit, parameter)
        wrapped = [module for module in model.modules() if type(module).__name__ in self.config.wrap]
        if missing := set(self.config.wrap) - {type(module).__name__ for module in wrapped}:
            raise ConfigError(
                f"xla-spmd.wrap names {', '.join(sorted(missing))}, but {type(model).__name__} has no module"
                " of this class\nname classes of its modules, or leave the option out"
            )
        for module in (*wrapped, model):
            unit.detach.append(module.register_forward_hook(self._output_of(unit)).remove)
        # Without a barrier the compiler may fuse the gradients of all layers, and would need memory for all
        # layers at once.
        for module in wrapped:
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
        # Scalars and empty tensors cannot be divided.
        if tensor.ndim and tensor.numel() and tensor.device.type == "xla":
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
        for tensor, shards in self._host_copies.pop(unit, {}).values():
            if shards[0].indices is Ellipsis:
                tensor.global_tensor.copy_(shards[0].data)
                continue
            # Several devices may hold the same part (dp_replicate). `_boxes` gave core the first of these
            # shards, so core has filled this one only. `reversed` lets the first shard of a part win.
            first_shards = {_offset(shard): shard.data for shard in reversed(shards)}
            for shard in shards:
                shard.data.copy_(first_shards[_offset(shard)])
            tensor.load_local_shards_(shards)

    @implements(hooks.checkpoint_committed)
    def checkpoint_committed(self, folder: Path | str, step: int | None) -> None:
        self._host_copies.clear()

    def _in_boxes(self, unit: Unit, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
        self._sync(wait=True)  # tensors have shards only when the graph that computes them has run
        return {name: self._boxes(unit, name, leaf) for name, leaf in leaves.items()}

    def _boxes(self, unit: Unit, name: str, leaf: Leaf) -> Leaf:
        """Return the leaf with host copies of its parts on this host's devices, each part once."""
        ((_, data),) = leaf.shards
        tensor = self._xs.wrap_if_sharded(data)
        if tensor is data:
            return leaf
        shards = tensor.local_shards
        self._host_copies.setdefault(unit, {})[name] = tensor, shards
        parts = {_offset(shard): _unpadded(shard) for shard in reversed(shards)}
        boxes = tuple((offset or (0,) * data.ndim, part) for offset, part in parts.items() if part.numel())
        return evolve(leaf, shards=boxes, replicated=self.run.world.size > 1)


def _offset(shard: Any) -> tuple[int, ...]:
    """Return the offset of a shard; empty for a shard that is the whole tensor."""
    return () if shard.indices is Ellipsis else tuple(index.start for index in shard.indices)


def _unpadded(shard: Any) -> Tensor:
    # XLA pads shards to equal sizes. `shard.unpadded_data` is not used: it indexes by a list, which torch
    # will read as a tensor of indices in a later release.
    part: Tensor = shard.data
    for dim, each in enumerate(() if shard.indices is Ellipsis else shard.indices):
        part = part.narrow(dim, 0, each.stop - each.start)
    return part
