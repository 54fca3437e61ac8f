"""fsdp_version 2: torch's fully_shard.

Parameters become DTensors in place; the model stays the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from accel_core import AccelError, ConfigError, before_step, hooks, implements
from accel_fsdp.classes import absent
from accel_fsdp.experts.stacks import Spread, split, spread
from accel_fsdp.sharding.accumulated import clear, clear_with, param_groups, sharded_parameters
from accel_fsdp.sharding.adopted import (
    described_as_adopted,
    is_adopted,
    note_made,
    sums_in_backward,
    tell_ignored,
    unmanaged,
)
from accel_fsdp.sharding.agreement import compare_gradients
from accel_fsdp.sharding.base import (
    FullyShardedDataParallel,
    evaluate_outside_inference_mode,
    reshard_after_evaluation,
)
from accel_fsdp.sharding.dims import sharding, stages
from accel_fsdp.sharding.gathering import whole, whole_by_block
from accel_fsdp.sharding.kinds import step_by_kind
from accel_fsdp.sharding.meta import move, send_weights
from accel_fsdp.sharding.norms import Layout, clip_norm, clip_value
from accel_fsdp.sharding.parameters import replace_parameter
from accel_fsdp.sharding.plain_state import part_of, take_plain_state, take_plain_weights
from accel_fsdp.sharding.precision import mixed_precision
from accel_fsdp.sharding.replicas import Replicas, local_of, send_replicas
from accel_fsdp.sharding.unused import HAS_ZEROS, Use, check_use
from accel_fsdp.sharding.wrapping import groups, ignored

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_core import Leaf, OptimizerState, Run, Unit
    from accel_fsdp.config import FullyShardedDataParallelPlugin
    from accel_fsdp.sharding.wrapping import Group

__all__ = ["Sharded", "refuse_second_order", "reshard"]


class Sharded(FullyShardedDataParallel):
    """`fully_shard` of each group."""

    def __init__(self, config: FullyShardedDataParallelPlugin, run: Run) -> None:
        super().__init__(config, run)
        if config.find_unused_parameters and not HAS_ZEROS:
            raise ConfigError(
                f"fsdp.find_unused_parameters needs torch 2.13 or newer, this is {torch.__version__}\n"
                "install a newer torch, or use the same parameters in each step, on all ranks"
            )
        self._layouts: WeakKeyDictionary[Unit, Layout] = WeakKeyDictionary()
        self._mixed: WeakSet[Unit] = WeakSet()
        """Units that have plain parameters beside sharded ones."""
        self._summed: WeakKeyDictionary[Unit, list[str]] = WeakKeyDictionary()
        """Modules whose gradients transformers reduces in each backward."""
        self._replicas: WeakKeyDictionary[Unit, list[Replicas]] = WeakKeyDictionary()
        self._reducing_in_other_dtypes: WeakSet[Unit] = WeakSet()
        """Units that gather weights in one dtype, and reduce gradients in another."""
        self._accumulating: WeakSet[Unit] = WeakSet()
        """Units that may have gradients that are not reduced yet."""
        self._uses: WeakKeyDictionary[Unit, Use] = WeakKeyDictionary()
        self._before: dict[tuple[nn.Module, str], nn.Parameter] = {}
        """Parameters of a model that is being prepared, as the user made them."""

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if phase == "quantize":
            self._before = dict(_places(model.modules()))
        if phase == "parallelize" and unit.mesh is not None and unit.mesh.size("ep") > 1:
            spread(model, self.config.ep_modules, unit.mesh.device_mesh["ep"])
        return super().transform_model(unit, model, phase)

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Shard the model by version 2. Collective."""
        self.find_ranks(unit)
        self._summed.setdefault(unit, []).extend(sums_in_backward(model))
        if is_adopted(model):
            return self._adopt(unit, model)
        arguments: dict[str, Any] = {
            "reshard_after_forward": self._reshards(unit),
            "mp_policy": mixed_precision(self.config, self.run),
            "offload_policy": self._offload(),
        }
        untouched = {p for module in ignored(model, self.config) for p in module.parameters()}
        elsewhere = {p for module in absent(model) for p in module.parameters()}
        made: list[Any] = []
        found, shards = groups(model, self.config), self.shards(model)
        self.tell_unused(model, len(found) - 1 if shards else 0)
        if shards:
            self.note_groups(unit, model, found)
        for group in found:
            self.materialize(group)
            whole_ones = group.own_parameters
            left = untouched | (elsewhere - {*whole_ones})  # a tied weight may be here and elsewhere
            left |= self._plain(unit, whole_ones)
            before = {place: self._before.pop(place, old) for place, old in _places(group.modules)}
            if shards:
                mesh = self._mesh_of(unit, group)
                made.append(fully_shard(group.module, mesh=mesh, ignored_params=left, **arguments))
            for place, new in _places(group.modules):
                if isinstance(new, DTensor) and before[place] is not new:
                    replace_parameter(before[place], new)
        if self.config.forward_prefetch:
            _prefetch_in_order(model, made[:-1])
        self._finish(unit, model, made)
        if made:
            self.guard_members(model, model, made[:-1])
        return model

    def _adopt(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Take over a model that the program has sharded. Collective."""
        tell_ignored(model, self.config)
        self.add_line(unit, described_as_adopted(model))
        made, apart = _sharded(model), unmanaged(model)
        _reshard(made)  # a loader may have left weights gathered
        groups = [self.mesh.get_group(dim) for dim in range(self.mesh.ndim)]
        for tensor in (*apart, *model.buffers()):
            move(tensor, self.run.device)
        if self.config.syncs:
            send_weights([local_of(parameter) for parameter in apart], groups)
            send_weights([*model.buffers()], [*groups, *self._replica_groups])
            send_replicas(model)
        if apart:
            self._mixed.add(unit)
        if apart and self.mesh.size() > 1:
            zeros = partial(_gives_zeros, self._uses, ref(unit))
            trainable = [parameter for parameter in apart if parameter.is_floating_point()]
            self._replicas.setdefault(unit, []).append(Replicas(trainable, self.mesh, zeros))
        self._finish(unit, model, made)
        return model

    def _finish(self, unit: Unit, model: nn.Module, made: Sequence[Any]) -> None:
        """Add what is ours to a model whose parts `made` are sharded."""
        note_made(made)
        policies = [group.mp_policy for group in param_groups(made)]
        if any(policy.reduce_dtype not in (None, policy.param_dtype) for policy in policies):
            self._reducing_in_other_dtypes.add(unit)
        if self.config.state_dict_type == "FULL_STATE_DICT":
            _give_whole_state_dicts(model)
        for module in made if self._takes_zeros(unit) else ():
            module.set_reduce_scatter_unused_params(True, recurse=False)
        if made:
            take_plain_weights(model)
            clear_with(model)
        for root in _outermost(model):
            evaluate_outside_inference_mode(root)
            root.register_forward_hook(refuse_second_order)
            reshard_after_evaluation(root, partial(_reshard, made))

    @implements(hooks.wrap_optimizer)
    def wrap_optimizer(self, unit: Unit, optimizer: Optimizer) -> Optimizer:
        # A forward after the backward has gathered weights, which the next one would take as they are.
        modules = [module for model in unit.models for module in _sharded(model)]
        before_step(optimizer, partial(_reshard, modules))
        if self.mesh.size() > 1 and modules:
            if unit not in self._uses:
                finds = self.config.find_unused_parameters
                whole = [each for group in self._replicas.get(unit, ()) for each in group.parameters]
                self._uses[unit] = Use(unit, modules, whole, self.mesh, finds=finds)
            check_use(unit, optimizer, self._uses[unit])
        compare_gradients(unit, optimizer)
        take_plain_state(optimizer)
        return optimizer

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        step = partial(self.below.optimizer_step, unit, optimizer)
        applied: bool = step_by_kind(optimizer, closure, step) if self.mixes(unit) else step(closure)
        return applied

    @implements(hooks.zero_grad)
    def zero_grad(self, unit: Unit, optimizer: Optimizer, set_to_none: bool) -> None:
        self.below.zero_grad(unit, optimizer, set_to_none)
        if unit in self._accumulating:
            clear(unit.models, chain.from_iterable(group["params"] for group in optimizer.param_groups))
        if unit in self._uses:
            self._uses[unit].forget(optimizer)

    @implements(hooks.no_sync)
    def no_sync(self, unit: Unit, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        if self.mesh.size() == 1 and self._summed.get(unit):
            raise AccelError(
                f"transformers sums the gradients of {self._summed[unit][0]} over tensor-parallel ranks in"
                " each backward: a window of several micro-batches would count the earlier ones several times"
                "\nload the model without tp_size, and let parallelism.tp split it; or make windows of one"
                " micro-batch"
            )
        if self.mesh.size() == 1 or self.reduces_each(unit):  # one rank has nothing to reduce
            return nullcontext()
        self._accumulating.add(unit)
        modules = [module for model in models for module in _sharded(model)]
        return _quiet(modules, self._replicas.get(unit, ()))

    @implements(hooks.clip_gradients)
    def clip_gradients(
        self, unit: Unit, parameters: Sequence[nn.Parameter], limit: float, norm_type: float | None
    ) -> Tensor | None:
        if norm_type is None:
            return clip_value(parameters, limit)
        layout = self._layouts.get(unit)
        if layout is None or not layout.is_of(parameters):
            again = self.counted_elsewhere(unit)
            layout = self._layouts[unit] = Layout.of(parameters, stages(unit.mesh), again)
        return clip_norm(layout, limit, norm_type, self.run.device)

    # -- state: sharded parameters, whatever a forward has left unsharded ---------------------------

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        reshard(unit)
        state: Mapping[str, Leaf] = self.below.model_state(unit)
        return state

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit: Unit, optimizer: Optimizer) -> OptimizerState:
        reshard(unit)
        state: OptimizerState = self.below.optimizer_state(unit, optimizer)
        return state

    @implements(hooks.iter_weights)
    def iter_weights(
        self, unit: Unit, dtype: torch.dtype | None, to: torch.device | None
    ) -> Iterator[tuple[str, Tensor]]:
        leaves = self.model_state(unit)
        parameters = unit.named_parameters()
        tensors = {
            name: parameters[name] if name in parameters else leaf.shards[0][1]
            for name, leaf in leaves.items()
        }
        for name, tensor in whole_by_block(unit.models, tensors):
            yield name, tensor.to(to, dtype if tensor.is_floating_point() else None)

    @implements(hooks.full_parameters)
    def full_parameters(
        self, unit: Unit, names: Sequence[str], writeback: bool
    ) -> AbstractContextManager[Any]:
        reshard(unit)
        # No set: gathering is collective, and all ranks go by one order.
        parameters = unit.named_parameters()
        return _whole(unit.models, [parameters[name] for name in names], writeback=writeback)

    def mixes(self, unit: Unit) -> bool:
        """Return True if the unit may have plain parameters beside sharded ones."""
        return unit in self._mixed

    def counted_elsewhere(self, unit: Unit) -> Collection[nn.Parameter]:
        """Parameters of this stage that another stage has too, which counts them."""
        return ()

    def shards(self, model: nn.Module) -> bool:
        """Return True if `fully_shard` has something to do for the model."""
        return True

    def _reshards(self, unit: Unit) -> bool | int | None:
        config = self.config
        if stages(unit.mesh) is None or (config.reshard_after_forward, config.sharding_strategy) != (
            None,
            None,
        ):
            return config.reshards
        return False  # else a stage gathers its blocks again for each micro-batch

    def reduces_each(self, unit: Unit) -> bool:
        """Return whether gradients are reduced in each micro-batch.

        torch cannot add its zeros for unused parameters to a window's sums of another dtype, and transformers
        sums some gradients over tensor-parallel ranks in each backward.
        """
        if self._summed.get(unit):
            return True
        use = self._uses.get(unit)
        return use is not None and use.gives_zeros and unit in self._reducing_in_other_dtypes

    def _takes_zeros(self, unit: Unit) -> bool:
        """Return whether unused parameters get a zero gradient, until an optimizer is prepared."""
        finds = self.config.find_unused_parameters or unit not in self._reducing_in_other_dtypes
        return HAS_ZEROS and finds and self.mesh.size() > 1

    def _plain(self, unit: Unit, parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
        """Return the parameters without elements, and note if there are any.

        torch cannot reduce their gradients.
        """
        found = {parameter for parameter in parameters if not parameter.numel()}
        if found:
            self._mixed.add(unit)
        return found

    def _mesh_of(self, unit: Unit, group: Group) -> DeviceMesh:
        """Return the ranks that share the group; experts are split over `ep` first.

        Collective.
        """
        if unit.mesh is None or not isinstance(group.module, Spread):
            return self.mesh
        split(group.module, unit.mesh.device_mesh["ep"])
        return sharding(unit.mesh, "ep")

    def _offload(self) -> OffloadPolicy:
        # torch pins memory for an accelerator, and raises if there is none.
        return (
            CPUOffloadPolicy(pin_memory=self.run.device.type != "cpu")
            if self.config.cpu_offload
            else OffloadPolicy()
        )


def _gives_zeros(uses: Mapping[Unit, Use], unit: ref[Unit]) -> bool:
    """Return whether unused parameters get a gradient, until a step drops the ones that no rank used."""
    use = uses.get(unit())  # type: ignore[arg-type]
    return use is None or use.gives_zeros


def refuse_second_order(module: nn.Module, inputs: Any, outputs: Any) -> None:
    """Refuse, in the backward of these outputs, a graph of it, whose weights would be gone by then."""
    for leaf in () if torch.compiler.is_compiling() else tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(_first_order)


def _first_order(gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        raise AccelError(
            "backward with create_graph=True (a gradient penalty, a Hessian) needs weights again after it,"
            " and sharded ones are not kept\nprepare this model with strategy ddp"
        )


def _places(modules: Iterable[nn.Module]) -> Iterator[tuple[tuple[nn.Module, str], nn.Parameter]]:
    """Places of parameters, (module, key); tied ones have several."""
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield (module, key), parameter


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _outermost(model: nn.Module) -> list[nn.Module]:
    """Return the sharded modules that are in no other one: the model, or parts of an adopted one."""
    if isinstance(model, FSDPModule):
        return [model]
    return list(dict.fromkeys(root for child in model.children() for root in _outermost(child)))


def reshard(unit: Unit) -> None:
    """Let weights go that a forward has left gathered."""
    for model in unit.models:
        _reshard(_sharded(model))


def _reshard(modules: Sequence[FSDPModule], *call: Any) -> None:
    for module in modules:
        module.reshard()


@contextmanager
def _quiet(modules: Sequence[FSDPModule], replicas: Sequence[Replicas]) -> Iterator[None]:
    def set_sync(*, syncs: bool) -> None:
        for module in modules:
            module.set_requires_gradient_sync(syncs, recurse=False)
        for each in replicas:
            each.syncs = syncs

    set_sync(syncs=False)
    try:
        yield
    finally:
        set_sync(syncs=True)


@contextmanager
def _whole(models: Sequence[nn.Module], wanted: Sequence[nn.Parameter], *, writeback: bool) -> Iterator[None]:
    stand_ins = {parameter: nn.Parameter(whole(parameter), parameter.requires_grad) for parameter in wanted}
    places = [
        (module._parameters, name, parameter)
        for model in models
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter in stand_ins
    ]
    loaded = [one for model in models for one in sharded_parameters(model)]
    for one in loaded:  # else torch looks for a shard in the whole tensors that `load_state_dict` gives
        one._post_load_hook_handle.remove()
    for table, name, parameter in places:
        table[name] = stand_ins[parameter]
    try:
        yield
    finally:
        for one in loaded:
            holder = one._module_info.module
            one._post_load_hook_handle = holder.register_load_state_dict_post_hook(partial(_look_anew, one))
        for table, name, parameter in places:
            table[name] = parameter
        if writeback:
            _write_back(stand_ins)


def _look_anew(one: Any, *call: Any) -> None:
    one.reset_sharded_param()


@torch.no_grad()
def _write_back(stand_ins: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, tensor in stand_ins.items():
        parameter.copy_(part_of(tensor.detach(), parameter))


def _prefetch_in_order(model: nn.Module, made: Sequence[FSDPModule]) -> None:
    order = [module for module in _sharded(model) if module in made]
    for module, following in pairwise(order):
        module.set_modules_to_forward_prefetch([following])


def _give_whole_state_dicts(model: nn.Module) -> None:
    """Make `state_dict()` collective and whole."""

    def gather(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, value in state.items():
            state[name] = whole(value).cpu() if isinstance(value, DTensor) else value

    model.register_state_dict_post_hook(gather)
