"""Pipeline parallelism.

A strategy for models whose stages are on the ranks of dimension `pp`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn

from accel_core import AccelError, ConfigError, OptimizerState, StepOutput, hooks, implements
from accel_fsdp.pipeline.schedules import Pipe
from accel_fsdp.pipeline.stages import note_hooks_of_plugins
from accel_fsdp.sharding.fsdp2 import Sharded, reshard
from accel_fsdp.sharding.gathering import whole
from accel_fsdp.sharding.wrapping import blocks, chosen_blocks, ignored, refuse_unfit

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import Leaf, Run, Unit
    from accel_fsdp.config import FullyShardedDataParallelPlugin
    from accel_fsdp.pipeline.schedules import ForwardLoss

__all__ = ["Pipelined"]


class Pipelined(Sharded):
    """FSDP of version 2, for a model whose stages are on different ranks."""

    def __init__(self, config: FullyShardedDataParallelPlugin, run: Run) -> None:
        super().__init__(config, run)
        self._pipes: WeakKeyDictionary[Unit, Pipe] = WeakKeyDictionary()

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        reasons = list(super().refuse_unit(unit, models, optimizers))
        if models and len(unit.models) + len(models) > 1:
            reasons.append("a pipeline steps one model\ngive each model an optimizer of its own")
        return reasons

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if phase == "parallelize":
            assert unit.mesh is not None
            group = unit.mesh.device_mesh.get_group("pp")
            apart = {p for module in ignored(model, self.config) for p in module.parameters()}
            sharded = {name: p for name, p in model.named_parameters() if p not in apart}
            _refuse_own_state(model)
            self._pipes[unit] = Pipe(model, self.config, group, self.run.device, ref(unit))
            # Of all stages, on all ranks: a rank alone would leave the others in a collective.
            refuse_unfit(model.modules(), sharded, self.config.fsdp_version)
        if phase == "checkpoint" and self.config.activation_checkpointing and not blocks(model, self.config):
            if not chosen_blocks(model, self.config):
                raise ConfigError(
                    "fsdp.activation_checkpointing would compute a whole model again, of which each rank of a"
                    " pipeline runs stages\nname its blocks: fsdp.transformer_cls_names_to_wrap"
                )
            return model  # this rank's stages have none
        if phase == "post":
            note_hooks_of_plugins(model)
        return super().transform_model(unit, model, phase)

    @implements(hooks.describe)
    def describe(self, unit: Unit) -> Sequence[str]:
        pipe = self._pipes.get(unit)
        return [*(pipe.described() if pipe else ()), *super().describe(unit)]

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Shard the stages, then find the weights that they tie. Collective."""
        wrapped = super().wrap_model(unit, model)
        self._pipes[unit].ties.begin()
        return wrapped

    def shards(self, model: nn.Module) -> bool:
        # A stage that no other rank shares stays whole: a mesh of one rank would cost half a step more.
        # Weights on the CPU, or gathered in other dtypes, need torch's hooks all the same. Layers that are
        # split do too: torch steps no plain tensors beside DTensors.
        only_stages = self.mesh.size() == 1 and not self._replica_groups
        return not only_stages or self.config.cpu_offload or self.config.mixed_precision_policy is not None

    def counted_elsewhere(self, unit: Unit) -> Collection[nn.Parameter]:
        return self._pipes[unit].ties.counted_elsewhere()

    # -- the step --------------------------------------------------------------------------------

    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> NoReturn:
        raise AccelError(
            f"unit {unit.name!r} is a pipeline, which does forward and backward in one schedule\n"
            "use accelerator.forward_backward(model, batches, forward_loss)"
        )

    @implements(hooks.forward_backward)
    def forward_backward(
        self,
        unit: Unit,
        batches: Iterator[Any],
        forward_loss: ForwardLoss,
        microbatches: int | None,
        forward_only: bool,
    ) -> StepOutput:
        """Run the schedule over one window. Collective.

        All ranks get the loss; ranks of the last stage also the outputs of `forward_loss`.
        """
        with unit.whole_window(batches, microbatches) as taken:
            scale, divisor = None if forward_only else self._scale(unit), unit.window.divisor
            output = self._pipes[unit].run(taken, forward_loss, scale, divisor)
        if forward_only:
            reshard(unit)  # gradients may wait for their step, and model.parameters() are to have them
        return output

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit: Unit) -> None:
        """Sum the gradients of tied weights. Collective."""
        self._pipes[unit].ties.sum()

    def _scale(self, unit: Unit) -> Tensor:
        """Loss scale of the layers below, read before a window's backward begins."""
        one = torch.ones((), device=self.run.device, requires_grad=True)
        self.below.backward(unit, one, True, {})
        assert one.grad is not None
        return one.grad

    # -- state: every name on every rank, tensors on their own ------------------------------------

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        leaves = super().model_state(unit).items()
        return {name: evolve(leaf, shards=_shards(leaf)) for name, leaf in leaves}

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit: Unit, optimizer: Optimizer) -> OptimizerState:
        state, absent = super().optimizer_state(unit, optimizer), _absent(unit)
        # A load has made tensors of the meta device for them, and counters.
        leaves = {
            key: evolve(leaf, shards=()) if key.rpartition("/")[0] in absent else leaf
            for key, leaf in state.leaves.items()
        }
        return evolve(state, leaves=leaves)

    @implements(hooks.iter_weights)
    def iter_weights(
        self, unit: Unit, dtype: torch.dtype | None, to: torch.device | None
    ) -> Iterator[tuple[str, Tensor]]:
        pipe, leaves = self._pipes[unit], self.model_state(unit)
        held, parameters = pipe.held(leaves), unit.named_parameters()  # sharded again by now
        for name, (leaf, owner, wanted) in held.items():
            if owner == pipe.rank:
                tensor = whole(parameters[name] if name in parameters else leaf.shards[0][1])
                tensor = tensor.to(self.run.device).contiguous()  # on which the others receive it
            else:
                tensor = torch.empty(leaf.global_shape, dtype=wanted, device=self.run.device)
            dist.broadcast(tensor, group=pipe.group, group_src=owner)
            yield name, tensor.to(to, dtype if tensor.is_floating_point() else None)

    @implements(hooks.full_parameters)
    def full_parameters(self, unit: Unit, names: Sequence[str], writeback: bool) -> NoReturn:
        raise AccelError(
            f"unit {unit.name!r} is a pipeline: no rank has the modules of all its stages\n"
            "read whole weights one by one: accelerator.iter_weights(model)"
        )


def _refuse_own_state(model: nn.Module) -> None:
    """Refuse state that only the rank of a stage would have right.

    Others keep modules that do not run.
    """
    tensors = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    known = {key for named in tensors for name, tensor in named for key in (name, id(tensor))}
    told = model.state_dict(keep_vars=True)
    if own := sorted(name for name, value in told.items() if known.isdisjoint((name, id(value)))):
        raise ConfigError(
            f"state_dict() has {', '.join(own[:8])}, which are neither parameters nor buffers;"
            " a checkpoint of a pipeline would hold what the first rank has, whichever stage runs them\n"
            "make them buffers, or set parallelism.pp: 1"
        )


def _shards(leaf: Leaf) -> tuple[Any, ...]:
    return tuple((at, tensor) for at, tensor in leaf.shards if not tensor.is_meta)


def _absent(unit: Unit) -> set[str]:
    return {name for name, parameter in unit.named_parameters().items() if parameter.is_meta}
