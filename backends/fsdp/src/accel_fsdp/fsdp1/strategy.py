"""fsdp_version 1: torch's FullyShardedDataParallel.

A group's weights are one flat vector, cut evenly.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from attrs import evolve
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  as everybody calls it

from accel_core import CheckpointError, ConfigError, before_step, hooks, implements
from accel_fsdp.fsdp1.flat_vectors import is_elsewhere, modules_of, parameters_of, parts_of
from accel_fsdp.fsdp1.wrapper import Wrapper, refuse_frozen, refuse_lost_gradients
from accel_fsdp.sharding.base import (
    FullyShardedDataParallel,
    evaluate_outside_inference_mode,
    reshard_after_evaluation,
)
from accel_fsdp.sharding.norms import Layout, clip_norm, is_double
from accel_fsdp.sharding.precision import mixed_precision
from accel_fsdp.sharding.wrapping import groups, ignored, replace

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core import Leaf, OptimizerState, Run, Unit
    from accel_fsdp.config import FullyShardedDataParallelPlugin
    from accel_fsdp.fsdp1.flat_vectors import Part

__all__ = ["Flat"]


class Flat(FullyShardedDataParallel):
    """`FullyShardedDataParallel` around each group.

    The model's own parameters are views of its vector.
    """

    def __init__(self, config: FullyShardedDataParallelPlugin, run: Run) -> None:
        super().__init__(config, run)
        self._accumulating: WeakSet[Unit] = WeakSet()
        """Units whose gradients wait for the end of a window."""

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        reasons = list(super().refuse_unit(unit, models, optimizers))
        if self.config.cpu_offload and self.run.config.accumulation.sync_each_batch:
            reasons.append(
                "accumulation.sync_each_batch: fsdp_version 1 with fsdp.cpu_offload keeps the gradient of the"
                " last micro-batch only\nleave sync_each_batch out, or set fsdp.fsdp_version: 2"
            )
        if self.run.device.type != "cpu":
            return reasons
        if self.config.cpu_offload:
            reasons.append(
                "fsdp.cpu_offload: fsdp_version 1 pins memory for an accelerator, and this run"
                " trains on the CPU\nleave it out, or set fsdp.fsdp_version: 2"
            )
        if getattr(self.config.state_dict_config, "offload_to_cpu", False):
            reasons.append(
                "fsdp.state_dict_config: state_dict() would end this process, as torch offloads from the CPU"
                " to the CPU\nmake it with offload_to_cpu=False"
            )
        return reasons

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Shard the model by version 1. Collective."""
        self.find_ranks(unit)
        arguments = self._arguments(model)
        found = groups(model, self.config)
        if self.config.strategy == "NO_SHARD" or self.mesh.size(self.mesh.ndim - 1) == 1:
            _refuse_other_orders(model)
        self.tell_unused(model, len(found) - 1)
        self.note_groups(unit, model, found)
        for group in found:
            self.materialize(group)
            with warnings.catch_warnings():
                # Said of NO_SHARD, and in a world of one.
                warnings.filterwarnings("ignore", ".*NO_SHARD.*")
                wrapped = Wrapper(group.module, **arguments)  # the last is around the model
            if group.module is not model:
                replace(model, {group.module: wrapped})
        if self.config.state_dict_type is not None:
            self._set_state_dict_type(wrapped)
        evaluate_outside_inference_mode(wrapped)
        made = FSDP.fsdp_modules(wrapped)
        wrapped.register_forward_pre_hook(partial(self._before_forward, ref(unit), made))
        reshard_after_evaluation(wrapped, partial(_free, made))
        self.guard_members(model, wrapped, [module for module in made if module is not wrapped])
        return wrapped

    def _set_state_dict_type(self, model: nn.Module) -> None:
        configs = (self.config.state_dict_config, self.config.optim_state_dict_config)
        with warnings.catch_warnings():
            # It recommends functions instead, which `model.state_dict()` does not ask.
            warnings.simplefilter("ignore", FutureWarning)
            FSDP.set_state_dict_type(model, StateDictType[self.config.state_dict_type or ""], *configs)

    def _arguments(self, model: nn.Module) -> dict[str, Any]:
        config, prefetch = self.config, self.config.backward_prefetch
        mesh, strategy = self.mesh, _strategy(config.strategy, replicates=self.mesh.ndim > 1)
        if mesh.ndim > 1 and mesh.size(1) == 1:
            # Of shards on one rank torch makes NO_SHARD too, and reduces gradients over that one rank.
            assert self.run.mesh is not None
            mesh, strategy = self.run.mesh.device_mesh["dp_replicate"], ShardingStrategy.NO_SHARD
        arguments: dict[str, Any] = {
            "device_mesh": mesh,
            "sharding_strategy": strategy,
            "cpu_offload": CPUOffload(offload_params=config.cpu_offload),
            "mixed_precision": mixed_precision(config, self.run),
            "ignored_modules": ignored(model, config),
            "device_id": self.run.device,
            "limit_all_gathers": config.limit_all_gathers,
            "use_orig_params": True,
        }
        if prefetch is not None:
            arguments["backward_prefetch"] = BackwardPrefetch.__members__.get(prefetch)
        if config.forward_prefetch is not None:
            arguments["forward_prefetch"] = config.forward_prefetch
        return arguments

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit: Unit, model: nn.Module, keep_compiled: bool) -> nn.Module:
        inner: nn.Module = model.module if isinstance(model, FSDP) else model
        unwrapped: nn.Module = self.below.unwrap_model(unit, inner, keep_compiled)
        return unwrapped

    @implements(hooks.wrap_optimizer)
    def wrap_optimizer(self, unit: Unit, optimizer: Optimizer) -> Optimizer:
        modules = [module for model in unit.wrapped for module in FSDP.fsdp_modules(model)]
        before_step(optimizer, partial(self._before_step, ref(unit), modules))
        return optimizer

    def _before_forward(self, unit: ref[Unit], modules: Sequence[FSDP], *call: Any) -> None:
        refuse_frozen(modules)
        if unit() not in self._accumulating:  # inside a window gradients are whole by intent
            refuse_lost_gradients(modules)

    def _before_step(self, unit: ref[Unit], modules: Sequence[FSDP], *call: Any) -> None:
        self._accumulating.discard(unit())  # type: ignore[arg-type]
        refuse_lost_gradients(modules)
        _free(modules)

    @implements(hooks.no_sync)
    def no_sync(self, unit: Unit, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        self._accumulating.add(unit)
        return _all(model.no_sync() for model in models if isinstance(model, FSDP))

    @implements(hooks.clip_gradients)
    def clip_gradients(
        self, unit: Unit, parameters: Sequence[nn.Parameter], limit: float, norm_type: float | None
    ) -> Tensor | None:
        if norm_type is None:
            return self.below.clip_gradients(unit, parameters, limit, None)  # type: ignore[no-any-return]
        parts, group = parts_of(unit), self.mesh.get_group(self.mesh.ndim - 1)
        kinds = tuple(int(parameter not in parts) for parameter in parameters)
        layout = Layout(tuple(parameters), kinds, ((group,), ()), is_double(parameters))
        return clip_norm(layout, limit, norm_type, self.run.device)

    # -- state ---------------------------------------------------------------------------------------

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        parts, parameters = parts_of(unit), unit.named_parameters()
        return {
            name: self._leaf(leaf, parts.get(parameters.get(name)))  # type: ignore[arg-type]
            for name, leaf in self.below.model_state(unit).items()
        }

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit: Unit, optimizer: Optimizer) -> OptimizerState:
        """Leave out counters of parameters of which this rank has no elements.

        It never steps these.
        """
        state: OptimizerState = self.below.optimizer_state(unit, optimizer)
        parts, parameters = parts_of(unit), unit.named_parameters()
        of = {key: parameters[key.rpartition("/")[0]] for key in state.leaves}
        leaves = {key: self._leaf(leaf, parts.get(of[key])) for key, leaf in state.leaves.items()}
        if encoded := [key for key, leaf in leaves.items() if leaf.kind == "opaque" and of[key] in parts]:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {encoded[0]} in an encoding of its own, and fsdp_version 1"
                " gives each rank other elements of the parameter\nset fsdp.fsdp_version: 2"
            )
        leaves = {
            key: evolve(leaf, shards=()) if is_elsewhere(of[key], parts) else leaf
            for key, leaf in leaves.items()
        }
        plain = {
            name: values for name, values in state.plain.items() if not is_elsewhere(parameters[name], parts)
        }
        return evolve(state, leaves=leaves, plain=plain)

    @implements(hooks.iter_weights)
    def iter_weights(
        self, unit: Unit, dtype: torch.dtype | None, to: torch.device | None
    ) -> Iterator[tuple[str, Tensor]]:
        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().to(to, dtype if tensor.is_floating_point() else None, copy=True)

        parts, names = parts_of(unit), {p: name for name, p in unit.named_parameters().items()}
        for module in modules_of(unit):
            mine = [p for p in parameters_of(module) if p in parts]
            with FSDP.summon_full_params(module, recurse=False, writeback=False):
                found = [(names[p], copied(p)) for p in mine]
            yield from found
        for name, leaf in self.below.model_state(unit).items():
            if unit.named_parameters().get(name) not in parts:
                yield name, copied(leaf.shards[0][1])

    @implements(hooks.full_parameters)
    def full_parameters(
        self, unit: Unit, names: Sequence[str], writeback: bool
    ) -> AbstractContextManager[Any]:
        wanted = {unit.named_parameters()[name] for name in names}
        holding = [module for module in modules_of(unit) if wanted.intersection(parameters_of(module))]
        return _all(FSDP.summon_full_params(module, recurse=False, writeback=writeback) for module in holding)

    def _leaf(self, leaf: Leaf, part: Part | None) -> Leaf:
        """Return the leaf of a parameter, or of a tensor like it: the range on this rank."""
        if part is None or leaf.kind != "like_param":
            return leaf
        return part.leaf(leaf.shards[0][1].flatten(), replicated=self.mesh.ndim > 1)


def _refuse_other_orders(model: nn.Module) -> None:
    """Refuse parameters in other memory orders if FSDP cuts none.

    Torch would give them the gradients of other elements.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            raise ConfigError(
                f"{name}, {list(parameter.shape)}: fsdp_version 1 without shards cannot train a parameter"
                f" with strides {parameter.stride()}\n"
                "before prepare: parameter.data = parameter.data.contiguous(); or set fsdp.fsdp_version: 2"
            )


def _strategy(name: str, *, replicates: bool) -> ShardingStrategy:
    """Torch's enum member; models sharded within replicas have other ones."""
    keeps = name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    if name == "NO_SHARD":
        return ShardingStrategy.NO_SHARD
    if replicates:
        return ShardingStrategy._HYBRID_SHARD_ZERO2 if keeps else ShardingStrategy.HYBRID_SHARD
    return ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD


def _free(modules: Sequence[FSDP], *call: Any) -> None:
    """Drop weights that a forward has left gathered.

    The next forward would take them as they are.
    """
    for module in modules:
        handle: Any = module._handle
        begun = handle and handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded")
        if begun and not handle.needs_unshard():
            handle.reshard(True)


@contextmanager
def _all(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
