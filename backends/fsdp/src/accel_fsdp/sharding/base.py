"""Strategy `fsdp`: the parts that both versions of torch's FSDP have in common.

`fsdp2` and `fsdp1` are the two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from accel_core import hooks, implements, join_process_group, leave_process_group
from accel_fsdp.carriers import refused_carrier
from accel_fsdp.checks import refused_sizes
from accel_fsdp.classes import has_become
from accel_fsdp.config import FullyShardedDataParallelPlugin
from accel_fsdp.sharding import dims, meta
from accel_fsdp.sharding.adopted import is_adopted, refused_layout, refused_parts, was_made
from accel_fsdp.sharding.optimizers import refused
from accel_fsdp.sharding.own_plan import refuse_members_alone
from accel_fsdp.sharding.parameters import with_hooks
from accel_fsdp.sharding.report import described, one_group
from accel_fsdp.sharding.wrapping import checkpointed, ignored, is_own_plan

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_core import MeshDim, Run, RunConfig, Unit, World
    from accel_fsdp.sharding.wrapping import Group

logger = logging.getLogger(__name__)

__all__ = ["FullyShardedDataParallel", "evaluate_outside_inference_mode", "reshard_after_evaluation"]


class FullyShardedDataParallel:
    """Each rank holds a part of every weight.

    Also in a world of one, which has a group of its own.
    """

    below: Any

    def __init__(self, config: FullyShardedDataParallelPlugin, run: Run) -> None:
        self.config = config
        self.run = run
        self._mesh: DeviceMesh | None = None
        self._replica_groups: list[ProcessGroup] = []
        self._described: WeakKeyDictionary[Unit, list[str]] = WeakKeyDictionary()
        """Lines about the groups of each unit."""

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        return list(refused_sizes(self.config, config.parallelism))

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config: RunConfig, world: World) -> Sequence[MeshDim]:
        return dims.declared(self.config, config.parallelism, world)

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks that share a model.

        One dimension to shard over, or one to replicate over before it.
        """
        assert self._mesh is not None, "a model is wrapped first"
        return self._mesh

    def find_ranks(self, unit: Unit) -> None:
        """Find the ranks that share the unit's models. Collective."""
        unit.set_forward_is_collective()
        if self._mesh is None and unit.mesh is not None:
            self._mesh, self._replica_groups = dims.sharding(unit.mesh), dims.replica_groups(unit.mesh)
        elif self._mesh is None:
            join_process_group(self.run, self.run)
            self._mesh = init_device_mesh(self.run.device.type, (1,), mesh_dim_names=("dp_shard",))

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        whole = {p for model in models for module in ignored(model, self.config) for p in module.parameters()}
        return [
            *refused_carrier(self.run, "fsdp"),
            *(reason for model in models if (reason := _trains_whole(model, whole))),
            *(reason for model in models if (reason := _sharded_before(model))),
            *(reason for model in models for reason in self._refuse_layout(unit, model)),
            *_sharing([*unit.models, *models]),
            *with_hooks(models, after_accumulation=self.config.fsdp_version == 1),
            *(
                reason
                for optimizer in optimizers
                if self.config.cpu_offload and (reason := _on_device_only(optimizer))
            ),
            *refused(
                optimizers,
                self.config.fsdp_version,
                {p: name for model in [*unit.models, *models] for name, p in model.named_parameters()},
                shards=dims.shards(unit.mesh),
                device=self.run.device,
                cuts=self.run.world.size > 1 and self.config.strategy != "NO_SHARD",
                stages=self.run.config.parallelism.get("pp", 1) != 1,
            ),
        ]

    def _refuse_layout(self, unit: Unit, model: nn.Module) -> Iterator[str]:
        """Yield the reasons why the run cannot train a model that the program has split or sharded."""
        if is_adopted(model):
            yield from refused_layout(unit, model, self.config)
        elif not was_made(model):
            yield from refused_parts(model, unit.mesh)

    @implements(hooks.model_init_context)
    def model_init_context(self, unit_name: str | None) -> AbstractContextManager[Any] | None:
        mesh = self.run.mesh
        first = mesh is None or mesh.index(*mesh.names("samples", "tokens")) == 0
        return meta.init_context(self.config, first=first)

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if phase == "checkpoint" and self.config.activation_checkpointing:
            return checkpointed(model, self.config, unit.hooks.checkpoint_function(unit))
        return model

    @implements(hooks.place_model)
    def place_model(self, unit: Unit, model: nn.Module, device: torch.device) -> nn.Module:
        # Groups are placed one by one, as they are sharded; ignored modules stay whole.
        for module in ignored(model, self.config):
            module.to(device)
        return model

    @implements(hooks.grad_scaler)
    def grad_scaler(self, unit: Unit) -> GradScaler | None:
        if self.run.config.mixed_precision != "fp16":
            scaler: GradScaler | None = self.below.grad_scaler(unit)
            return scaler
        from accel_fsdp.sharding.loss_scale import loss_scaler_of  # late: only fp16 needs it

        return loss_scaler_of(self.run)

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        if self._mesh is not None:
            self._mesh = None
            leave_process_group(self.run)

    @implements(hooks.describe)
    def describe(self, unit: Unit) -> Sequence[str]:
        return self._described.get(unit, ())

    def add_line(self, unit: Unit, line: str) -> None:
        """Add a line to `explain()`."""
        self._described.setdefault(unit, []).append(line)

    def note_groups(self, unit: Unit, model: nn.Module, found: Sequence[Group]) -> None:
        """Keep lines about the groups, before they are sharded; warn of one that nobody asked for."""
        self._described.setdefault(unit, []).extend(described(model, found))
        if self.run.world.rank == 0 and len(found) == 1 and (warning := one_group(model, self.config)):
            logger.warning(warning)

    def guard_members(self, model: nn.Module, prepared: nn.Module, members: Sequence[nn.Module]) -> None:
        """Refuse calls of blocks that were found in a prepared Sequential, from outside its forward."""
        if members and is_own_plan(self.config) and isinstance(model, nn.Sequential):
            refuse_members_alone(prepared, members)

    def tell_unused(self, model: nn.Module, blocks: int) -> None:
        """Log options that do nothing for this model."""
        config, first = self.config, self.run.world.rank == 0
        whole = not any(tensor.is_meta for tensor in model.parameters())
        outside = f"this {type(model).__name__} was not built in accelerator.model_init_context()"
        few = (
            f"it is sharded with {blocks} block(s), of which none follows another; see fsdp.auto_wrap_policy"
        )
        nothing = {
            "param_init_fn": (config.param_init_fn is not None and whole and first, outside),
            "cpu_ram_efficient_loading": (config.cpu_ram_efficient_loading and whole and not first, outside),
            "forward_prefetch": (config.forward_prefetch and blocks < 2 and first, few),
        }
        for name, (is_unused, reason) in nothing.items():
            if is_unused:
                logger.warning("fsdp.%s does nothing: %s", name, reason)

    def materialize(self, group: Group) -> None:
        """Give a group's tensors storage and first values, the same on all ranks.

        Collective.
        """
        meta.materialize(group, self.config, self.mesh, self._replica_groups, self.run.device)


def _trains_whole(model: nn.Module, whole: set[nn.Parameter]) -> str | None:
    name = next((name for name, p in model.named_parameters() if p in whole and p.requires_grad), None)
    if name is None:
        return None
    return (
        f"{name} is in one of fsdp.ignored_modules, but requires a gradient, which nobody would reduce\n"
        "freeze it with requires_grad_(False), or do not ignore its module"
    )


def _sharded_before(model: nn.Module) -> str | None:
    by_torch = any(hasattr(module, "_is_fsdp_managed_module") for module in model.modules())
    sharded = was_made(model) or (by_torch and not is_adopted(model))  # version 1 can only be wrapped anew
    if not (sharded or has_become(model)):
        return None
    done = "sharded" if sharded else "cut into stages"
    return (
        f"this {type(model).__name__} was {done} by an earlier prepare, which cannot be undone\n"
        "build it anew; get_state_dict(model, rank0_only=False) before, and load_state_dict after that keep"
        " its weights"
    )


def _sharing(models: Sequence[nn.Module]) -> Iterator[str]:
    """Yield a reason for a parameter of two models, each of which would shard it."""
    first: dict[nn.Parameter, str] = {}
    for model in models:
        own = dict(model.named_parameters())
        if name := next((name for name, p in own.items() if p in first), None):
            yield (
                f"{name} of the {type(model).__name__} is {first[own[name]]} too, and fsdp shards each model"
                " by itself\nput both models into one module and prepare that, or choose strategy ddp"
            )
        first.update({p: f"{name} of the {type(model).__name__}" for name, p in own.items()})


def _on_device_only(optimizer: Optimizer) -> str | None:
    if not any(group.get("capturable") for group in optimizer.param_groups):
        return None
    return (
        f"{type(optimizer).__name__}(capturable=True) steps on the device, but fsdp.cpu_offload keeps"
        " parameters on the CPU\nmake it without capturable, or switch cpu_offload off"
    )


def evaluate_outside_inference_mode(model: nn.Module) -> None:
    """Run forwards in `torch.inference_mode` under `torch.no_grad` instead.

    An evaluation gathers weights into the memory that later forwards use, which train.
    """
    instead = ExitStack()

    def enter(*call: Any) -> None:
        if torch.is_inference_mode_enabled():
            instead.enter_context(torch.inference_mode(False))
            instead.enter_context(torch.no_grad())

    def leave(*call: Any) -> None:
        instead.close()

    model.register_forward_pre_hook(torch.compiler.disable(enter), prepend=True)
    model.register_forward_hook(torch.compiler.disable(leave), always_call=True)


def reshard_after_evaluation(model: nn.Module, reshard: Callable[[], None]) -> None:
    """Call `reshard` after each forward of the model that has no graph.

    torch keeps the weights of the outermost group, and of all groups if `reshard_after_forward` is
    false, gathered for the backward. If no backward comes, an edit in place (clamping, an average of
    weights) would change the gathered copy and be lost. The cost: the next forward gathers them again.
    """

    def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled() or not any(map(_may_have_graph, tree_leaves(outputs))):
            reshard()

    model.register_forward_hook(torch.compiler.disable(after))


def _may_have_graph(leaf: Any) -> bool:
    # torch looks for the graph in the same leaves. An object of another class may hold tensors.
    if isinstance(leaf, torch.Tensor):
        return leaf.requires_grad
    return not isinstance(leaf, (int, float, str, bytes, type(None)))
