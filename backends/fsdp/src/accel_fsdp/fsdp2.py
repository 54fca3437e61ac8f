"""fsdp_version 2: torch's fully_shard.

Parameters become DTensors in place; the model stays the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from attrs import frozen
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from accel_core import AccelError, before_step, hooks, implements
from accel_fsdp.accumulated import clear, clear_with
from accel_fsdp.agreement import compare_gradients
from accel_fsdp.base import (
    FullyShardedDataParallel,
    outside_inference_mode,
    reshard_after_evaluation,
    with_lost_ranks_named,
)
from accel_fsdp.dims import sharding, stages
from accel_fsdp.experts import Spread, split, spread
from accel_fsdp.kinds import step_by_kind
from accel_fsdp.norms import Layout, clip_norm, clip_value
from accel_fsdp.parameters import guard_conversions, refuse_assigned, refuse_stand_ins, replace_parameter
from accel_fsdp.precision import mixed_precision
from accel_fsdp.stages import absent
from accel_fsdp.unused import Unused, followed, parameter_groups
from accel_fsdp.wrapping import groups, ignored

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_core import Leaf, OptimizerState, Run, Unit
    from accel_fsdp.config import FullyShardedDataParallelPlugin
    from accel_fsdp.parameters import Place
    from accel_fsdp.wrapping import Group

__all__ = ["Sharded", "first_order", "reshard", "whole"]


class Sharded(FullyShardedDataParallel):
    """`fully_shard` of each group."""

    def __init__(self, config: FullyShardedDataParallelPlugin, run: Run) -> None:
        super().__init__(config, run)
        self._layouts: WeakKeyDictionary[Unit, Layout] = WeakKeyDictionary()
        self._mixed: WeakSet[Unit] = WeakSet()
        """Units that have plain parameters beside sharded ones."""
        self._places: WeakKeyDictionary[Unit, list[list[Place]]] = WeakKeyDictionary()
        """Places of sharded parameters, by what looks at them."""
        self._accumulating: WeakSet[Unit] = WeakSet()
        """Units that may have gradients that are not reduced yet."""
        self._before: dict[tuple[nn.Module, str], nn.Parameter] = {}
        """Parameters of a model that is being prepared, as the user made them."""

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if phase == "quantize":
            self._before = dict(_places(model.modules()))
        if phase == "parallelize" and unit.mesh is not None and self.config.ep_size != 1:
            spread(model, self.config.ep_modules, unit.mesh.device_mesh["ep"])
        return super().transform_model(unit, model, phase)

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Shard the model by version 2. Collective."""
        self.join(unit)
        arguments: dict[str, Any] = {
            "reshard_after_forward": self.config.reshards,
            "mp_policy": mixed_precision(self.config, self.run),
            "offload_policy": self._offload(),
        }
        names = {parameter: name for name, parameter in model.named_parameters()}
        untouched = {p for module in ignored(model, self.config) for p in module.parameters()}
        elsewhere = {p for module in absent(model) for p in module.parameters()}
        made = []
        found, shards = groups(model, self.config), self.shards(model)
        self.tell_unused(model, len(found) - 1 if shards else 0)
        for group in found:
            self.materialize(group)
            whole_ones = group.own_parameters
            left = untouched | (elsewhere - {*whole_ones})  # a tied weight may be here and elsewhere
            left |= self._plain(unit, whole_ones)
            before = {place: self._before.pop(place, old) for place, old in _places(group.modules)}
            called = {place: names.get(old, "") for place, old in _places(group.modules)}
            if shards:
                mesh = self._mesh_of(unit, group)
                made.append(fully_shard(group.module, mesh=mesh, ignored_params=left, **arguments))
            for place, new in _places(group.modules):
                if isinstance(new, DTensor) and before[place] is not new:
                    replace_parameter(before[place], new, called[place])
        looked_at = [self._guard(module) for module in made]
        looked_at.append(_guard_split(model, [place for places in looked_at for place in places]))
        self._places.setdefault(unit, []).extend(looked_at)
        if self.config.forward_prefetch:
            _prefetch_in_order(model, made[:-1])
        if self.config.state_dict_type == "FULL_STATE_DICT":
            _give_whole_state_dicts(model)
        if self.mesh.size() > 1:
            rehearses = partial(self.rehearses, unit)
            Unused(unit, model, self.mesh, always=self.config.find_unused_parameters, rehearses=rehearses)
        if made:
            refuse_assigned(model)
            clear_with(model)
            reshard_after_evaluation(model, partial(_reshard, made))
        guard_conversions(model)
        return model

    @implements(hooks.wrap_optimizer)
    def wrap_optimizer(self, unit: Unit, optimizer: Optimizer) -> Optimizer:
        # A forward after the backward has gathered weights, which the next one would take as they are.
        modules = [module for model in unit.models for module in _sharded(model)]
        before_step(optimizer, partial(_reshard, modules))
        for unused in followed(unit.wrapped):
            before_step(optimizer, unused.refuse_unreduced)
        compare_gradients(unit, optimizer)
        wrapped: Optimizer = self.below.wrap_optimizer(unit, optimizer)
        return wrapped

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        step = partial(self.below.optimizer_step, unit, optimizer)
        applied: bool = step_by_kind(optimizer, closure, step) if self.mixes(unit) else step(closure)
        return applied

    @implements(hooks.zero_grad)
    def zero_grad(self, unit: Unit, optimizer: Optimizer, set_to_none: bool) -> None:
        self.below.zero_grad(unit, optimizer, set_to_none)
        if unit in self._accumulating:
            sharded = (one for places in self._places.get(unit, ()) for _, _, (one, *_) in places)
            clear(sharded, lambda: chain.from_iterable(group["params"] for group in optimizer.param_groups))

    @implements(hooks.no_sync)
    def no_sync(self, unit: Unit, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        if self.mesh.size() == 1:  # nothing to reduce, and torch would keep the gradients apart from a step
            return nullcontext()
        self._accumulating.add(unit)
        return _quiet([module for model in models for module in _sharded(model)])

    @implements(hooks.clip_grad_norm)
    def clip_grad_norm(
        self, unit: Unit, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float
    ) -> Tensor:
        layout = self._layouts.get(unit)
        if layout is None or not layout.is_of(parameters):
            again = self.counted_elsewhere(unit)
            layout = self._layouts[unit] = Layout.of(parameters, stages(unit.mesh), again)
        return clip_norm(layout, max_norm, norm_type, self.run.device)

    @implements(hooks.clip_grad_value)
    def clip_grad_value(self, unit: Unit, parameters: Sequence[nn.Parameter], value: float) -> None:
        clip_value(parameters, value)

    # -- state: sharded parameters, whatever a forward has left unsharded ---------------------------

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        self._require_own_data(unit)
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
        for name, leaf in leaves.items():
            tensor = whole(parameters[name] if name in parameters else leaf.shards[0][1])
            yield name, tensor.to(to, dtype if tensor.is_floating_point() else None)

    @implements(hooks.full_parameters)
    def full_parameters(
        self, unit: Unit, names: Sequence[str], writeback: bool
    ) -> AbstractContextManager[Any]:
        self._require_own_data(unit)
        # No set: gathering is collective, and all ranks go by one order.
        parameters = unit.named_parameters()
        return _whole(unit.models, [parameters[name] for name in names], writeback=writeback)

    def mixes(self, unit: Unit) -> bool:
        """Return True if the unit may have plain parameters beside sharded ones."""
        return unit in self._mixed

    def counted_elsewhere(self, unit: Unit) -> Collection[nn.Parameter]:
        """Parameters of this stage that another stage has too, which counts them."""
        return ()

    def rehearses(self, unit: Unit) -> bool:
        """Return True if the backward that runs was not called by the user."""
        return False

    def shards(self, model: nn.Module) -> bool:
        """Return True if `fully_shard` has something to do for the model."""
        return True

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        """Let go of the unit.

        Its model is torch's alone from then on, and may be converted.
        """
        super().release(unit)
        for places in self._places.pop(unit, ()):
            places.clear()

    def _require_own_data(self, unit: Unit) -> None:
        """Let gathered weights go, and refuse shards whose parameters have other data."""
        reshard(unit)
        for places in self._places.get(unit, ()):
            _refuse_other_data(places)

    def _guard(self, module: Any) -> list[Place]:
        """Let a sharded module name lost ranks, and refuse what torch passes over."""
        state = module._get_fsdp_state()
        vars(state)["_pre_backward"] = partial(_begin, state._pre_backward)
        for gathering in parameter_groups(state):
            for name in ("unshard", "wait_for_unshard"):
                gather = outside_inference_mode(getattr(gathering, name))
                vars(gathering)[name] = with_lost_ranks_named(gather, self.run)
            _take_over_flags(gathering)
        places = _sharded_places(state)
        refuse_stand_ins(module, places, _is_own)
        _guard_state_dicts(places)
        for one in (one for gathering in parameter_groups(state) for one in gathering.fsdp_params):
            vars(one)["reset_sharded_param"] = partial(_reset, one, one.reset_sharded_param)
        return places

    def _plain(self, unit: Unit, parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
        """Return those without elements, and note if there are any.

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
        # torch pins memory for an accelerator, and raises where there is none.
        return (
            CPUOffloadPolicy(pin_memory=self.run.device.type != "cpu")
            if self.config.cpu_offload
            else OffloadPolicy()
        )


def _take_over_flags(gathering: Any) -> None:
    """Let shards be frozen, or not, as a user has left their gathered parameters.

    After a forward the module has these, and torch forgets their `requires_grad`.
    """
    gather, let_go = gathering._to_unsharded, gathering._to_sharded
    flags: list[bool] = []

    def gathered() -> None:
        if not gathering.is_unsharded:
            flags[:] = [one.sharded_param.requires_grad for one in gathering.fsdp_params]
        gather()

    def resharded() -> None:
        for one, before in zip(gathering.fsdp_params, flags, strict=False):  # none in the beginning
            if one.unsharded_param.requires_grad is not before:
                one.sharded_param.requires_grad_(not before)
        flags.clear()
        let_go()

    vars(gathering).update(_to_unsharded=gathered, _to_sharded=resharded)


def _begin(begin: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
    return begin(first_order(gradient))


def first_order(gradient: Tensor) -> Tensor:
    """Return a backward's first gradient, unless a graph of it is wanted.

    The weights of that graph would be gone by then.
    """
    if torch.is_grad_enabled():
        raise AccelError(
            "backward with create_graph=True (a gradient penalty, a Hessian) needs weights again after it,"
            " and sharded ones are not kept\nprepare this model with strategy ddp"
        )
    return gradient


def _places(modules: Iterable[nn.Module]) -> Iterator[tuple[tuple[nn.Module, str], nn.Parameter]]:
    """Places of parameters, (module, key); tied ones have several."""
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield (module, key), parameter


def _sharded_places(state: Any) -> list[Place]:
    return [
        (module, key, (one, one.sharded_param, one.sharded_param.untyped_storage()))
        for gathering in parameter_groups(state)
        for one in gathering.fsdp_params
        for info in [one._module_info]
        for module, key in (
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names, strict=True),
        )
    ]


@frozen
class _Split:
    """A parameter of a layer that is split, looked at as one of torch's groups is."""

    sharded_param: Tensor
    unsharded_accumulated_grad: None = None


def _guard_split(model: nn.Module, others: Iterable[Place]) -> list[Place]:
    """Refuse `parameter.data = tensor` of split layers in no group of torch's."""
    known = {(holder, key) for holder, key, _ in others}
    places: list[Place] = [
        (*place, (_Split(parameter), parameter, parameter.untyped_storage()))
        for place, parameter in _places(model.modules())
        if isinstance(parameter, DTensor) and place not in known
    ]

    def look(*call: Any) -> None:
        if not torch.compiler.is_compiling():
            _refuse_other_data(places)

    if places:
        model.register_forward_pre_hook(look)
        _guard_state_dicts(places)
    return places


def _guard_state_dicts(places: Sequence[Place]) -> None:
    held: dict[nn.Module, list[Place]] = {}
    for place in places:
        held.setdefault(place[0], []).append(place)

    def look(holder: nn.Module, *call: Any) -> None:
        if places:  # until their unit is released
            _refuse_other_data(held.get(holder, ()))  # a copy of it holds none

    for holder in held:
        holder.register_state_dict_pre_hook(look)


def _reset(one: Any, reset: Callable[[], None]) -> None:
    """Let torch look at a shard anew, after `load_state_dict`.

    Inside `full_parameters` a whole weight was loaded, and the shard is as it was.
    """
    if isinstance(one._module_info.module._parameters.get(one._module_info.param_name), DTensor):
        reset()


def _is_own(asked: tuple[Any, Tensor, Any], tensor: Tensor | None) -> bool:
    one, *_ = asked
    if tensor is one.sharded_param:
        return not _has_other_data(*asked)
    gathered = (getattr(one, name, None) for name in ("_unsharded_param", "_sharded_post_forward_param"))
    return tensor is not None and any(tensor is each for each in gathered)


def _has_other_data(one: Any, made: Tensor, storage: Any) -> bool:
    """Return True if `parameter.data = tensor` left its shard as it was."""
    return one.sharded_param is made and made.untyped_storage()._cdata != storage._cdata


def _refuse_other_data(places: Iterable[Place]) -> None:
    for holder, key, asked in places:
        if _has_other_data(*asked):
            raise AccelError(
                f"the sharded parameter {key} of {type(holder).__name__} was given other data"
                " (parameter.data = tensor), which no forward and no save would use: its shard is as it was\n"
                "change weights in place (parameter.copy_ under no_grad), or inside"
                " full_parameters(model, writeback=True)"
            )


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, apart from its storage. Collective."""
    data: Any = tensor.detach()
    if not isinstance(data, DTensor):
        return tensor.detach().clone()
    found: Tensor = data.full_tensor()
    return found.clone() if found.is_set_to(data.to_local()) else found


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(unit: Unit) -> None:
    """Let weights go that a forward has left gathered."""
    for model in unit.models:
        _reshard(_sharded(model))


def _reshard(modules: Sequence[FSDPModule], *call: Any) -> None:
    for module in modules:
        module.reshard()


@contextmanager
def _quiet(modules: Sequence[FSDPModule]) -> Iterator[None]:
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


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
    for table, name, parameter in places:
        table[name] = stand_ins[parameter]
    try:
        yield
    finally:
        for table, name, parameter in places:
            table[name] = parameter
        if writeback:
            _write_back(stand_ins)


@torch.no_grad()
def _write_back(stand_ins: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, tensor in stand_ins.items():
        parameter.copy_(_like(tensor.detach(), parameter))


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, as the parameter is sharded.

    Not collective.
    """
    if not isinstance(parameter, DTensor):
        return tensor
    where = tensor.to(parameter.device)
    return distribute_tensor(where, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _prefetch_in_order(model: nn.Module, made: Sequence[FSDPModule]) -> None:
    order = [module for module in _sharded(model) if module in made]
    for module, following in pairwise(order):
        module.set_modules_to_forward_prefetch([following])


def _give_whole_state_dicts(model: nn.Module) -> None:
    """Make `state_dict()` collective and whole; `load_state_dict` takes it again."""

    def gather(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, value in state.items():
            state[name] = whole(value).cpu() if isinstance(value, DTensor) else value

    def scatter(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for name, parameter in module.named_parameters():
            if isinstance(state.get(prefix + name), torch.Tensor):
                state[prefix + name] = _like(state[prefix + name], parameter)

    model.register_state_dict_post_hook(gather)
    model.register_load_state_dict_pre_hook(scatter)
