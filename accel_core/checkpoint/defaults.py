"""The state hooks of the base layer: state by canonical name, as torch holds it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from accel_core.contract import hooks
from accel_core.contract.hooks import implements
from accel_core.contract.state import LeavesOnUse, OptimizerState, leaf_of
from accel_core.contract.world import RandomStream
from accel_core.distributed.nested import send_to_device
from accel_core.errors import CheckpointError
from accel_core.plugins.discovery import suggest_strategy
from accel_core.storage.leaves import PLAIN_TYPES, parts_of, wraps

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.run import Run
    from accel_core.contract.state import Json, Kind, Leaf, TensorTemplate
    from accel_core.contract.unit import Unit

_CODES: Final = frozenset({torch.uint8, torch.int8, torch.bool})
"""Dtypes of state that an optimizer encodes itself, as 8-bit optimizers do."""


class BaseState:
    """The state hooks of the base layer."""

    run: Run

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        return model_state(unit)

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit: Unit, optimizer: Optimizer) -> OptimizerState:
        refuse_own_state(optimizer)
        groups = _named_groups(unit, optimizer)
        names = chain.from_iterable(group["params"] for group in groups)
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        held = {id(parameter): state for parameter, state in optimizer.state.items()}  # hashing takes time
        tensors: list[tuple[str, Tensor, Mapping[str, Tensor]]] = []
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in zip(names, parameters, strict=True):
            state = held.get(id(parameter), {})
            own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            _require_names(optimizer, own)
            tensors.append((name, parameter, own))
            if len(state) > len(own):
                plain[name] = {key: value for key, value in state.items() if key not in own}
        leaves = LeavesOnUse(partial(_state_leaves, tensors, type(optimizer).__qualname__))
        values = (value for *_, own in tensors for value in own.values())
        if any(type(value) not in PLAIN_TYPES or value.is_nested for value in values):
            len(leaves)  # makes the leaves: leaves of such tensors may raise, and must raise before a load
        return OptimizerState(leaves=leaves, plain=plain, groups=groups)

    @implements(hooks.refuse_optimizer_state)
    def refuse_optimizer_state(
        self,
        unit: Unit,
        optimizer: Optimizer,
        template: Mapping[str, Mapping[str, TensorTemplate]],
        plain: Mapping[str, Mapping[str, Json]],
    ) -> Sequence[str]:
        if not _has_wrappers(template):
            return ()
        from accel_core.checkpoint.wrapped_state import refusals  # late: few optimizers wrap tensors

        names = {id(parameter): name for name, parameter in unit.named_parameters().items()}
        return refusals(optimizer, names, template)

    @implements(hooks.materialize_optimizer_state)
    def materialize_optimizer_state(
        self,
        unit: Unit,
        optimizer: Optimizer,
        template: Mapping[str, Mapping[str, TensorTemplate]],
        plain: Mapping[str, Mapping[str, Json]],
    ) -> None:
        # late: slow to import
        from accel_core.checkpoint.wrapped_state import take_wrappers
        from accel_core.storage.tensor_bytes import DTYPES

        wrapped = _has_wrappers(template)
        names = {id(parameter): name for name, parameter in unit.named_parameters().items()}
        held = {id(parameter): state for parameter, state in optimizer.state.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                wanted, values = template.get(name, {}), plain.get(name, {})
                if not (wanted or values) and id(parameter) not in held:
                    continue  # `state` makes an entry on access; an optimizer without state has none
                state = held[id(parameter)] if id(parameter) in held else optimizer.state[parameter]
                made, wanted = take_wrappers(optimizer, group, parameter, wanted) if wrapped else ({}, wanted)
                state.update(made)
                for key in state.keys() - wanted.keys() - made.keys():
                    del state[key]
                for key, tensor in wanted.items():
                    here, dtype = state.get(key), DTYPES[tensor.dtype]
                    is_like = isinstance(here, Tensor) and here.dtype == dtype
                    if not (is_like and here.shape == tensor.global_shape):
                        state[key] = _allocate(parameter, group, key, tensor, dtype)
                if values:
                    state.update(send_to_device(dict(values), parameter.device))

    @implements(hooks.full_parameters)
    def full_parameters(
        self, unit: Unit, names: Sequence[str], writeback: bool
    ) -> AbstractContextManager[Any]:
        _require_present(unit)
        return nullcontext()

    @implements(hooks.iter_weights)
    def iter_weights(
        self, unit: Unit, dtype: torch.dtype | None, to: torch.device | None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _tensors(unit).items():
            yield name, tensor.detach().to(to, dtype if tensor.is_floating_point() else None)

    @implements(hooks.random_streams)
    def random_streams(self) -> Mapping[str, RandomStream]:
        return {
            "python": RandomStream(
                lambda: _pack(random.getstate()),
                lambda state: random.setstate(_unpack(state, "python")),
                random.seed,
            ),
            "numpy": RandomStream(  # the global stream
                lambda: _pack(np.random.get_state(legacy=False)),  # noqa: NPY002
                lambda state: np.random.set_state(_unpack(state, "numpy")),  # noqa: NPY002
                lambda seed: np.random.seed(seed % 2**32),  # noqa: NPY002
            ),
            # torch.manual_seed seeds every device too.
            "torch": RandomStream(torch.get_rng_state, torch.set_rng_state, torch.manual_seed),
            **_device_streams(self.run),
        }


def model_state(unit: Unit) -> dict[str, Leaf]:
    """Return the unit's parameters and persistent buffers, as torch holds them.

    Tied weights are returned once. A tensor that wraps others, such as a quantised weight, is stored as its
    parts, `NAME#PART`, with a layout that names the wrapper's class.
    """
    leaves: dict[str, Leaf] = {}
    for name, tensor in _tensors(unit).items():
        if wraps(tensor):
            for part, inner, layout in parts_of(tensor):
                leaves[f"{name}#{part}"] = leaf_of(inner, kind="opaque", layout=layout)
        else:
            leaves[name] = leaf_of(tensor)
    return leaves


def _named_groups(unit: Unit, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the optimizer's groups with names instead of parameters.

    Raises:
        CheckpointError: a parameter belongs to no prepared model.
    """
    names = {id(parameter): name for name, parameter in unit.named_parameters().items()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        listed = [names.get(id(parameter), "") for parameter in group["params"]]
        if "" in listed:
            raise CheckpointError(
                f"parameter {listed.index('')} of group {number} of {type(optimizer).__name__} belongs to no"
                f" prepared model of unit {unit.name!r}, so it has no name to be stored under\n"
                "make it a parameter of a module, and prepare that"
            )
        hyperparameters = {key: group[key] for key in group if key not in ("params", "param_names")}
        groups.append({**hyperparameters, "params": listed})
    return groups


def _state_leaves(kept: Sequence[tuple[str, Tensor, Mapping[str, Tensor]]], layout: str) -> dict[str, Leaf]:
    """Return the leaves of an optimizer's tensors.

    Args:
        kept: (parameter's name, parameter, its tensors by key) of each parameter.
        layout: layout of tensors that the optimizer encodes itself, and that cannot be split.
    """
    from accel_core.checkpoint.wrapped_state import part_leaves  # late: start-up need not wait for it

    leaves: dict[str, Leaf] = {}
    for name, parameter, tensors in kept:
        shape = parameter.shape
        packed = not _CODES.isdisjoint([value.dtype for value in tensors.values() if value.ndim])
        for key, value in tensors.items():
            if type(value) not in PLAIN_TYPES and (parts := part_leaves(f"{name}/{key}", value)):
                leaves.update(parts)
            elif value.ndim == 0:
                leaves[f"{name}/{key}"] = leaf_of(value, kind="scalar")
            elif packed:
                leaves[f"{name}/{key}"] = leaf_of(value, kind="opaque", layout=layout)
            else:
                kind: Kind = "like_param" if value.shape == shape else "factored"
                leaves[f"{name}/{key}"] = leaf_of(value, kind=kind)
    return leaves


def refuse_own_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer with state that belongs to no parameter or group.

    Raises:
        CheckpointError: the optimizer has such state; the message names it.
    """
    held: dict[Any, Any] = optimizer.state  # torch declares that keys are parameters
    odd = [key for key in held if not isinstance(key, Tensor)]
    if not odd and _has_own_state_dict(optimizer):
        odd = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
    if odd:
        raise CheckpointError(
            f"{type(optimizer).__qualname__} keeps {odd[0]!r}, which belongs to no parameter: it would not be"
            " saved\nkeep it with the parameters, or in an object given to register_for_checkpointing"
        )


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    # A wrapper that never calls torch's `__init__` has none of torch's hooks.
    hooks = [getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post")]
    return any(hooks) or type(optimizer).state_dict is not Optimizer.state_dict


def _require_names(optimizer: Optimizer, keys: Iterable[Any]) -> None:
    """Refuse keys of an optimizer's tensors that cannot be the last part of a leaf's key."""
    for key in keys:
        if type(key) is not str or "/" in key:
            raise CheckpointError(
                f"{type(optimizer).__qualname__} keeps a tensor of a parameter under {key!r}\n"
                "name it by text without '/'"
            )


def _require_present(unit: Unit) -> None:
    """Refuse models with weights that are loaded only while they are used.

    The attribute `weight_away` of a forward pre-hook names a weight whose parameter has no values.
    """
    for model in unit.models:
        for hook in (hook for module in model.modules() for hook in module._forward_pre_hooks.values()):
            if name := getattr(hook, "weight_away", None):
                raise CheckpointError(
                    f"{name} of the {type(model).__name__} is loaded only while it is used, and strategy"
                    f" {unit.strategy!r} would save it as empty\n{suggest_strategy('streamed_weights')}"
                )


def _tensors(unit: Unit) -> dict[str, Tensor]:
    _require_present(unit)
    found: dict[str, Tensor] = {**unit.named_parameters()}
    for number, model in enumerate(unit.models):
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if name not in module._non_persistent_buffers_set:
                    found[unit.names.qualify(number, f"{prefix}.{name}" if prefix else name)] = buffer
    for name, tensor in found.items():
        if tensor.is_nested or is_lazy(tensor):  # has no shape to store
            from accel_core.storage.codec import require_plain  # late: start-up need not wait for it

            require_plain(f"model/{name} of unit {unit.name!r}", tensor)
    return found


def _has_wrappers(templates: Mapping[str, Mapping[str, TensorTemplate]]) -> bool:
    """Return whether the stored state of some parameter has parts of wrappers."""
    for template in templates.values():
        for name, stored in template.items():
            if "#" in name and stored.kind == "opaque":
                return True
    return False


def _allocate(
    parameter: nn.Parameter,
    group: Mapping[str, Any],
    key: str,
    template: TensorTemplate,
    dtype: torch.dtype,
) -> Tensor:
    if template.kind == "like_param":
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # torch keeps the step counter on the host, unless its kernels read it on the device.
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    if on_host:
        return torch.empty(template.global_shape, dtype=dtype, device="cpu")
    return parameter.detach().new_empty(template.global_shape, dtype=dtype)


def _pack(state: Any) -> Tensor:
    from accel_core.storage.codec import encode  # late: start-up need not wait for it

    return torch.frombuffer(bytearray(json.dumps(encode(state, "random")).encode()), dtype=torch.uint8)


def _unpack(stream: Tensor, name: str) -> Any:
    from accel_core.storage.codec import decode  # late: start-up need not wait for it

    return decode(json.loads(bytes(stream.tolist())), name)


def _device_streams(run: Run) -> dict[str, RandomStream]:
    """Return the streams of the run's device and, in a world of one, of all other devices of its kind."""
    kind, own = run.device.type, run.device
    module: Any = getattr(torch, kind, None)  # not every backend adds a device module to torch
    if not hasattr(module, "get_rng_state"):
        return {}
    others = range(module.device_count() if run.world.size == 1 else 0)
    rest = {f"{kind}:{index}": torch.device(kind, index) for index in others if index != (own.index or 0)}

    def stream(at: torch.device) -> RandomStream:
        return RandomStream(lambda: module.get_rng_state(at), lambda state: module.set_rng_state(state, at))

    return {name: stream(device) for name, device in {kind: own, **rest}.items()}
