"""Names and extra state that a model's own `state_dict` has beside plain weights.

Modules add to it by `get_extra_state`, `_save_to_state_dict`, `state_dict` and hooks. It is asked of a copy
whose weights are stand-ins without values: sharded weights need not be gathered to know their names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy as shallow
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accel_core.checkpoint.codec import require_plain
from accel_core.checkpoint.own_state import is_same
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.contract.unit import Unit

logger = logging.getLogger(__name__)


@frozen
class ModuleState:
    """The keys of a model's `state_dict`, without the model's number in the unit.

    names: canonical name -> the keys under which `state_dict` has that weight; None where each
    weight has its name. extra: key -> what else is in `state_dict`.
    """

    names: dict[str, list[str]] | None = None
    extra: dict[str, Any] = field(factory=dict)

    def keys_of(self, names: list[str]) -> list[str]:
        """Return the keys of a weight of these canonical names."""
        return names if self.names is None else [key for name in names for key in self.names.get(name, ())]


class _StandIn(nn.Parameter):
    """A weight without values."""

    canonical: str
    outline: tuple[torch.Size, torch.dtype]

    def detach(self) -> _StandIn:
        return self


def module_state(unit: Unit, number: int) -> ModuleState:
    """Return the names and extra state of the unit's model `number`. Not collective.

    Raises:
        CheckpointError: `state_dict` computes something from weights.
    """
    model, prefix = unit.models[number], unit.qualify(number, "")
    if not any(map(_has_own_state_dict, model.modules())):
        return ModuleState()
    told = state_dict_outline(unit, number)
    tensors = (name for name, _ in _tensors(model))
    found = ModuleState({unit.qualify(number, name).removeprefix(prefix): [] for name in tensors})
    assert found.names is not None
    for key, value in told.items():
        name = value.canonical if isinstance(value, _StandIn) else key
        if isinstance(value, _StandIn) and value.outline != (value.shape, value.dtype):
            raise CheckpointError(
                f"{type(model).__qualname__}.state_dict() brings {key!r} into another layout, in which it is"
                " stored\ncall the model's own state_dict() before, which leaves the weights so"
            )
        # Extra state goes back by set_extra_state, which a name of a weight does not.
        if name in found.names and key.rpartition(".")[2] != "_extra_state":
            found.names[name].append(key)
        elif isinstance(value, Tensor) and value.is_meta:
            raise CheckpointError(
                f"{type(model).__qualname__}.state_dict() computes {key!r} from weights, which may be in"
                " parts or elsewhere\nkeep it in a buffer, or as a value of its own in get_extra_state"
            )
        else:
            found.extra[key] = value
    return found


def state_dict_outline(unit: Unit, number: int) -> dict[str, Any]:
    """Return the state dict of the unit's model `number`, stand-ins for weights.

    Not collective.
    """
    return _copy_without_weights(unit, number, unit.models[number], "").state_dict()


def owner_of(unit: Unit, number: int, key: str) -> nn.Module | None:
    """Return the innermost module that can take back a key of a `state_dict`."""
    modules, prefix = _modules(unit, number), unit.qualify(number, "")
    name = key
    while name:
        name = name.rpartition(".")[0]
        module = modules.get(f"{prefix}{name}".removesuffix("." if prefix and not name else ""))
        if module is not None and _has_own_state_dict(module):
            return module
    return None


def restore_extra(unit: Unit, number: int, extra: Mapping[str, Any]) -> None:
    """Give modules back the extra state that `module_state` found.

    Weights are left as they are.
    """
    model, prefix = unit.models[number], unit.qualify(number, "")
    here = module_state(unit, number).extra
    values = {
        key: value.to(here[key].device)
        if isinstance(value, Tensor) and isinstance(here.get(key), Tensor)
        else value
        for key, value in extra.items()
    }
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        told = model.load_state_dict(values, strict=False)
        _require_taken(model, getattr(told, "unexpected_keys", ()), values, here)
        return
    names = {module: name.removeprefix(prefix) for name, module in _modules(unit, number).items()}
    by_module: dict[nn.Module, dict[str, Any]] = {}
    for key, value in values.items():
        by_module.setdefault(owner_of(unit, number, key) or model, {})[key] = value
    for module, state in by_module.items():
        name = names[module] if module is not model else ""
        unexpected: list[str] = []
        errors: list[str] = []
        metadata = {"version": module._version}
        start = f"{name}." if name else ""
        module._load_from_state_dict(state, start, metadata, True, [], unexpected, errors)
        if errors:
            about = f"{name or type(model).__qualname__}: {'; '.join(errors)}"
            raise CheckpointError(f"{about}\nbuild the model as it was when it was saved")
        _require_taken(module, unexpected, values, here)


def _require_taken(
    module: nn.Module, ignored: Sequence[str], values: Mapping[str, Any], here: Mapping[str, Any]
) -> None:
    """Raise if a module takes no notice of tensors, and has others itself."""
    kind = type(module).__qualname__
    differ = [key for key in ignored if not _same(values[key], here.get(key))]
    if tensors := [key for key in differ if isinstance(values[key], Tensor)]:
        raise CheckpointError(
            f"{kind} takes no notice of its {', '.join(tensors)}, and has other values\n"
            "build the model with the values that were saved, or take the plugin that restores them"
        )
    if differ:
        logger.warning("%s takes no notice of its %s", kind, ", ".join(differ))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):  # stored, where the module may have a parameter
        return isinstance(other, Tensor) and one.dtype == other.dtype and is_same(one, other)
    alike = type(one) is type(other) and getattr(one, "dtype", None) == getattr(other, "dtype", None)
    return alike and is_same(one, other)


def _has_own_state_dict(module: nn.Module) -> bool:
    kind = type(module)
    return not isinstance(module, torch.jit.ScriptModule) and (
        kind.get_extra_state is not nn.Module.get_extra_state
        or kind._save_to_state_dict is not nn.Module._save_to_state_dict
        or kind.state_dict is not nn.Module.state_dict
        or any(not _is_torchs(hook) for hook in module._state_dict_hooks.values())
    )


def _is_torchs(hook: Any) -> bool:
    """Tell the hooks of torch's own wrappers, which only undo what they do to names."""
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _modules(unit: Unit, number: int) -> dict[str, nn.Module]:
    """Canonical name -> module; of a wrapper and what is in it, the latter."""
    named = unit.models[number].named_modules(remove_duplicate=False)
    return {unit.qualify(number, name).rstrip("."): module for name, module in named}


def _copy_without_weights(unit: Unit, number: int, module: nn.Module, name: str) -> nn.Module:
    """Copy the module with stand-ins for weights, without torch's wrappers and hooks."""
    here = f"{name}." if name else ""
    canonical = unit.qualify(number, name).rstrip(".")
    for key, child in module._modules.items():
        if child is not None and unit.qualify(number, here + key).rstrip(".") == canonical:
            return _copy_without_weights(unit, number, child, here + key)
    if isinstance(module, torch.jit.ScriptModule):
        return module
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    for tensors in ("_parameters", "_buffers"):
        stands = {
            key: None if tensor is None else _stand_in(unit, number, here + key, tensor)
            for key, tensor in module.__dict__[tensors].items()
        }
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
            for key, stand in stands.items():  # for what it tells of weights may be in their attributes
                if stand is not None:
                    vars(stand).update(_attributes(module.__dict__[tensors][key]) | vars(stand))
        copy.__dict__[tensors] = stands
    for hooks in ("_state_dict_hooks", "_state_dict_pre_hooks"):
        mine = {key: hook for key, hook in module.__dict__[hooks].items() if not _is_torchs(hook)}
        copy.__dict__[hooks] = mine
    copy.__dict__["_modules"] = {
        key: None if child is None else _copy_without_weights(unit, number, child, here + key)
        for key, child in module._modules.items()
    }
    return copy


def _stand_in(unit: Unit, number: int, name: str, tensor: Tensor) -> _StandIn:
    if is_lazy(tensor) or tensor.is_nested:  # without a shape
        require_plain(f"{name} of unit {unit.name!r}", tensor)
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    stand: _StandIn = torch.Tensor._make_subclass(_StandIn, like, False)
    stand.outline = tensor.shape, tensor.dtype
    stand.canonical = unit.qualify(number, name).removeprefix(unit.qualify(number, ""))
    return stand


def _attributes(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor's attributes, such that the tensor's own are not changed."""
    own = dict(vars(tensor))
    for key, value in vars(tensor).items():
        with suppress(TypeError):  # a handle, such as of a process group
            own[key] = value if isinstance(value, Tensor) else shallow(value)
    return own
