"""Names and entries that a model's `state_dict` has beside the names of its weights.

A weight is recognised by identity. If ranks hold parts of weights, `state_dict` is called on a copy of the
model whose parameters have no values: no rank gathers weights, and no value is computed from parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from accel_core.errors import CheckpointError
from accel_core.storage.codec import is_same

if TYPE_CHECKING:
    from accel_core.contract.unit import Unit

logger = logging.getLogger(__name__)

_WRAPPERS: Final = ("torch.distributed.", "torch.nn.parallel.", "torch._dynamo.")
"""Modules of torch whose `state_dict` methods only undo the changes that the modules make to names."""


def exported(unit: Unit, number: int) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return the keys of each weight in `state_dict` of the unit's model `number`, and its extra state.

    Not collective. The keys are by canonical name: tied weights have one name and several keys, a weight that
    `state_dict` leaves out has no keys. Extra state is by key: values that modules return by
    `get_extra_state`, or add by `_save_to_state_dict`, by hooks or by a `state_dict` of their own.

    Raises:
        CheckpointError: extra state is a weight, or is computed from weights that have no values here.
    """
    model, prefix = unit.models[number], unit.names.qualify(number, "")
    if not _adds_to_state_dict(model):
        return _own_keys(unit, number, model), {}
    if not unit.has_whole_weights:
        model = _without_values(unit, number, model, "")
    owners = {key: owner for owner, keys in _own_keys(unit, number, model).items() for key in keys}
    places: dict[int, list[str]] = {}
    for name, tensor in _tensors(model):
        places.setdefault(id(tensor), []).append(unit.names.qualify(number, name).removeprefix(prefix))
    names: dict[str, list[str]] = {owner: [] for owner in owners.values()}
    extra: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        key = unit.names.qualify(number, name).removeprefix(prefix)
        same = places.get(id(value), [key])
        weight = key if key in same else same[0]
        if weight not in owners:
            _refuse_computed(model, key, value)
            extra[key] = value
        elif key.rpartition(".")[2] == "_extra_state":
            raise CheckpointError(
                f"{key} of the {type(model).__qualname__} is its {weight}, which has its own name in a file\n"
                "leave the weight out of what get_extra_state returns"
            )
        else:
            names[owners[weight]].append(key)
    return names, extra


def extra_state(unit: Unit, number: int) -> dict[str, Any]:
    """Return the extra state of the unit's model `number`, by its keys. Not collective."""
    return exported(unit, number)[1] if _adds_to_state_dict(unit.models[number]) else {}


def _adds_to_state_dict(model: nn.Module) -> bool:
    return any(map(_has_more, model.modules()))


def _own_keys(unit: Unit, number: int, model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each weight, by its canonical name (the first name of tied weights)."""
    prefix, names = unit.names.qualify(number, ""), dict[str, list[str]]()
    for name, _ in _tensors(model):
        canonical = unit.names.qualify(number, name)
        owner = unit.names.aliases.get(canonical, canonical)
        names.setdefault(owner, []).append(canonical.removeprefix(prefix))
    return names


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _refuse_computed(model: nn.Module, key: str, value: Any) -> None:
    if any(isinstance(each, Tensor) and each.is_meta for each in tree_leaves(value)):
        raise CheckpointError(
            f"state_dict() of the {type(model).__qualname__} computes {key} from weights that this rank does"
            " not hold whole\nkeep it in a buffer, or as a value of its own in get_extra_state"
        )


def _without_values(unit: Unit, number: int, module: nn.Module, name: str) -> nn.Module:
    """Return a copy of the module whose parameters have no values, without modules that wrap its parts."""
    here = f"{name}." if name else ""
    canonical = unit.names.qualify(number, name).rstrip(".")
    for key, child in module._modules.items():
        if child is not None and unit.names.qualify(number, here + key).rstrip(".") == canonical:
            return _without_values(unit, number, child, here + key)
    if isinstance(module, torch.jit.ScriptModule):
        return module
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__.update(
        module.__dict__,
        _parameters={
            key: None if each is None else _stand_in(each) for key, each in module._parameters.items()
        },
        _modules={
            key: each if each is None else _without_values(unit, number, each, here + key)
            for key, each in module._modules.items()
        },
    )
    return copy


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    stand = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), False)
    vars(stand).update(vars(parameter))  # extra state may come from attributes of a weight
    return stand


def warn_of_hooks_that_only_save(unit: Unit, extra: Iterable[str]) -> None:
    """Warn once of keys of extra state that a module's hooks add and the module cannot take back."""
    for number in range(len(unit.models)) if extra else ():
        prefix = unit.names.qualify(number, "")
        mine = [key.removeprefix(prefix) for key in extra if key.startswith(prefix)]
        for module, keys in takers(unit, number, mine).items():
            if _own_hooks(module) and not _takes_back(module):
                _warn_once(type(module).__qualname__, tuple(keys.values()))


@cache
def _warn_once(kind: str, keys: tuple[str, ...]) -> None:
    logger.warning(
        "a hook of the %s adds %s to its state_dict, and nothing takes it back: load_state refuses other"
        " values than the model has then; register_load_state_dict_pre_hook restores them",
        kind,
        ", ".join(keys),
    )


def _takes_back(module: nn.Module) -> bool:
    methods = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
    return _overrides(module, *methods) or bool(module._load_state_dict_pre_hooks)


def takers(unit: Unit, number: int, keys: Iterable[str]) -> dict[nn.Module, dict[str, str]]:
    """Return module -> the keys that it can take back: key in the module -> key in the model."""
    taken: dict[nn.Module, dict[str, str]] = {}
    modules = dict(_modules_with_more(unit, number))
    for key in keys:
        prefix, name = key, ""
        while prefix:  # until the innermost module that has extra state
            prefix, _, part = prefix.removesuffix(".").rpartition(".")
            prefix, name = f"{prefix}." if prefix else "", f"{part}.{name}" if name else part
            if (module := modules.get(prefix)) is not None:
                taken.setdefault(module, {})[name] = key
                break
    return taken


def restore_extra(module: nn.Module, here: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Load a module's extra state. Weights are left as they are.

    Args:
        module: the module.
        here: the extra state that the module has now.
        state: the extra state to load.

    Raises:
        CheckpointError: the module does not take a value, and has another value now.
    """
    values = {
        key: value.to(here[key].device)
        if isinstance(value, Tensor) and isinstance(here.get(key), Tensor)
        else value
        for key, value in state.items()
    }
    result = module.load_state_dict(values, strict=False)
    unexpected = getattr(result, "unexpected_keys", ())
    if ignored := [key for key in unexpected if not is_same(values.get(key), here.get(key))]:
        raise CheckpointError(
            f"{type(module).__qualname__} takes no notice of its {', '.join(ignored)}, and has other values\n"
            "build the model as it was when it was saved"
        )


def _modules_with_more(unit: Unit, number: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield (prefix of its keys, module) of each module whose `state_dict` has more than weights."""
    start = unit.names.qualify(number, "")
    for name, module in unit.models[number].named_modules():
        if _has_more(module):
            canonical = (
                unit.names.qualify(number, name).rstrip(".").removeprefix(start.rstrip(".")).lstrip(".")
            )
            yield f"{canonical}." if canonical else "", module


def _has_more(module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule) and (
        _overrides(module, "get_extra_state", "_save_to_state_dict", "state_dict") or bool(_own_hooks(module))
    )


def _overrides(module: nn.Module, *names: str) -> bool:
    """Return whether the module's class overrides a method; methods of torch's wrappers do not count."""
    methods = ((getattr(type(module), name), getattr(nn.Module, name)) for name in names)
    return any(own is not plain and not _is_from(own, _WRAPPERS) for own, plain in methods)


def _own_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks on the module's `state_dict`, without hooks of torch."""
    return [each for each in module._state_dict_hooks.values() if not _is_from(each, "torch.")]


def _is_from(function: Any, modules: str | tuple[str, ...]) -> bool:
    return str(getattr(function, "__module__", "")).startswith(modules)
