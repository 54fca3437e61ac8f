"""Entries that modules add to their `state_dict` beside weights, which are recognised by identity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from accel_core.errors import CheckpointError
from accel_core.storage.codec import is_same

if TYPE_CHECKING:
    from accel_core.contract.unit import Unit

_WRAPPERS: Final = ("torch.distributed.", "torch.nn.parallel.", "torch._dynamo.")
"""Modules of torch whose classes only undo what they do to names."""


def extra_state(unit: Unit, number: int) -> dict[str, Any]:
    """Return the extra state of the unit's model `number`, by its keys. Not collective.

    It is what modules return by `get_extra_state`, or add by `_save_to_state_dict`, by hooks or by a
    `state_dict` of their own.
    """
    found: dict[str, Any] = {}
    for prefix, module in _modules_with_more(unit, number):
        own, entries = {**module._parameters, **module._buffers}, _entries_of(module)
        weights = {id(each) for each in own.values()}
        found |= {
            f"{prefix}{key}": value
            for key, value in entries.items()
            if key not in own and id(value) not in weights
        }
    return found


def left_out(unit: Unit, number: int) -> set[str]:
    """Return the names of weights that their modules leave out of `state_dict`."""
    names = set()
    for prefix, module in _modules_with_more(unit, number):
        own, entries = {**module._parameters, **module._buffers}, _entries_of(module)
        weights = {id(each) for each in entries.values()}
        names |= {
            f"{prefix}{key}" for key, each in own.items() if key not in entries and id(each) not in weights
        }
    return names


def _entries_of(module: nn.Module) -> dict[str, Any]:
    """Return what the module tells in `state_dict`, but for that of its children."""
    children = tuple(f"{name}." for name, _ in module.named_children())
    entries = module.state_dict(keep_vars=True)
    return {key: value for key, value in entries.items() if not key.startswith(children)}


def takers(unit: Unit, number: int, keys: Mapping[str, Any]) -> dict[nn.Module, dict[str, str]]:
    """Return for each module the keys that it can take back: its own key -> that of the model."""
    taken: dict[nn.Module, dict[str, str]] = {}
    modules = dict(_modules_with_more(unit, number))
    for key in keys:
        prefix, name = key, ""
        while prefix:  # the innermost module that tells such state
            prefix, _, part = prefix.removesuffix(".").rpartition(".")
            prefix, name = f"{prefix}." if prefix else "", f"{part}.{name}" if name else part
            if (module := modules.get(prefix)) is not None:
                taken.setdefault(module, {})[name] = key
                break
    return taken


def restore_extra(module: nn.Module, here: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Give a module its extra state back. Weights are left as they are.

    here: what it has now.

    Raises:
        CheckpointError: it does not take it.
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
    """Yield (prefix of its keys, module) of each module that tells more than weights."""
    start = unit.qualify(number, "")
    for name, module in unit.models[number].named_modules():
        if _has_more(module):
            canonical = unit.qualify(number, name).rstrip(".").removeprefix(start.rstrip(".")).lstrip(".")
            yield f"{canonical}." if canonical else "", module


def _has_more(module: nn.Module) -> bool:
    kind = type(module)
    return not (isinstance(module, torch.jit.ScriptModule) or kind.__module__.startswith(_WRAPPERS)) and (
        kind.get_extra_state is not nn.Module.get_extra_state
        or kind._save_to_state_dict is not nn.Module._save_to_state_dict
        or kind.state_dict is not nn.Module.state_dict
        or bool(_own_hooks(module))
    )


def _own_hooks(module: nn.Module) -> list[Any]:
    """Return hooks on what the module's `state_dict` tells, but for those of torch's own wrappers."""
    hooks = module._state_dict_hooks.values()
    return [each for each in hooks if not str(getattr(each, "__module__", "")).startswith("torch.")]
