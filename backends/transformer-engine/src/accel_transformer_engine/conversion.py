"""Conversion of layers to Transformer Engine's, in place, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from copy import deepcopy
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from accel_core import AccelError, ConfigError

if TYPE_CHECKING:
    from accel_transformer_engine.inputs import Inputs

__all__ = ["convert", "drop_extra_state", "fuse", "watch", "without_extra_state"]

Undo = Callable[[], None]


def convert(chosen: Mapping[str, nn.Module], te: Any, inputs_of: Callable[[str], Inputs]) -> list[Undo]:
    """Have the chosen layers compute by Transformer Engine.

    The functions returned undo it. A layer stays the same object, with its parameters, hooks, training mode
    and attributes.

    inputs_of: name of a linear layer -> the preparation of its inputs.
    """
    undo = []
    for name, layer in chosen.items():
        like = _like(layer, te)
        settings = {"_inputs": inputs_of(name)} if isinstance(layer, nn.Linear) else {}
        undo.append(_become(layer, like, settings))
    return undo


def fuse(model: nn.Module, fused: Mapping[str, Callable[..., Any]]) -> tuple[list[str], list[Undo]]:
    """Replace modules by those that the user's functions make of them.

    Returns their names, and functions that undo it.

    Raises:
        ConfigError: a pattern matches no module.
    """
    names: list[str] = []
    undo: list[Undo] = []
    for pattern, build in fused.items():
        found = [name for name, _ in model.named_modules() if name and re.fullmatch(pattern, name)]
        if not found:
            raise ConfigError(
                f"fp8_te.fused: no module of the {type(model).__name__} has a name like {pattern!r}\n"
                "give a pattern of whole names of named_modules()"
            )
        for name in found:
            before = model.get_submodule(name)
            undo += _replace(model, before, build(before))
            names.append(name)
    return names, undo


def _replace(model: nn.Module, before: nn.Module, made: nn.Module) -> list[Undo]:
    """Put a module in all places of another."""
    places = [
        (parent, key)
        for parent in model.modules()
        for key, child in parent._modules.items()
        if child is before
    ]
    for parent, key in places:
        setattr(parent, key, made)
    return [partial(setattr, parent, key, before) for parent, key in places]


def watch(model: nn.Module, inputs_of: Callable[[str], Inputs]) -> list[Undo]:
    """Have fused and the user's own layers raise where converted ones do."""
    undo: list[Undo] = []
    for name, layer in model.named_modules():
        own = type(layer).__module__.startswith("transformer_engine.")
        if own and isinstance(getattr(layer, "fp8_meta", None), dict):
            inputs = inputs_of(name)
            undo.append(layer.register_forward_pre_hook(inputs.before).remove)
            undo.append(layer.register_forward_hook(inputs.after).remove)
    return undo


def drop_extra_state(model: nn.Module) -> list[Undo]:
    """Keep Transformer Engine's pickled state out of `state_dict`.

    The user's own layers of that library are changed too. Their scales and histories are in checkpoints as
    tensors.
    """
    undo: list[Undo] = []
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith("transformer_engine.") and _has_extra_state(kind):
            module.__class__ = without_extra_state(cast("Hashable", kind))
            undo.append(partial(setattr, module, "__class__", kind))
    return undo


@cache
def without_extra_state(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class that is the same, without `_extra_state`; pickle cannot find it."""
    plain = {name: getattr(nn.Module, name) for name in ("get_extra_state", "set_extra_state")}
    copies = {"__deepcopy__": _copied, "__reduce_ex__": _refuse_pickle}
    return type(kind.__name__, (kind,), {**plain, **copies, "__module__": __name__})


def _copied(layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy as `copy.deepcopy` does where it may reduce."""
    made: nn.Module = type(layer).__new__(type(layer))
    memo[id(layer)] = made
    made.__setstate__(deepcopy(vars(layer), memo))
    return made


def _refuse_pickle(layer: nn.Module, _protocol: Any) -> Any:
    raise AccelError(
        f"a {type(layer).__name__} that fp8-te has converted cannot be pickled: its class is this process's\n"
        "save accelerator.get_state_dict(model), or pickle the model after accelerator.end_training()"
    )


def _has_extra_state(kind: type[nn.Module]) -> bool:
    return kind.get_extra_state is not nn.Module.get_extra_state


@cache
def _classes(te: Any) -> dict[type[nn.Module], type[nn.Module]]:
    """Class of torch -> the class that its layers get."""
    prepared = import_module("accel_transformer_engine.inputs").prepared
    linear = type("Linear", (prepared(te.Linear),), {"__module__": __name__})
    classes = {nn.Linear: linear, nn.LayerNorm: te.LayerNorm, nn.RMSNorm: te.RMSNorm}
    return {torchs: without_extra_state(tes) for torchs, tes in classes.items()}


def _like(layer: nn.Module, te: Any) -> nn.Module:
    """Build a layer of Transformer Engine of the same shape, without weights."""
    kind = _classes(te)[type(layer)]
    dtype = layer.get_parameter("weight").dtype
    if isinstance(layer, nn.Linear):
        bias = layer.bias is not None
        return kind(layer.in_features, layer.out_features, bias=bias, params_dtype=dtype, device="meta")
    assert isinstance(layer, (nn.LayerNorm, nn.RMSNorm))
    return kind(layer.normalized_shape, eps=layer.eps, dtype=dtype, device="meta")


def _become(layer: nn.Module, like: nn.Module, more: Mapping[str, Any]) -> Undo:
    """Give a layer the class and the settings of another, not its parameters."""
    kind, plain = type(layer), {*vars(nn.Module()), *layer._parameters}
    settings = {key: value for key, value in vars(like).items() if key not in plain}
    settings |= more
    before = {key: value for key, value in vars(layer).items() if key in settings}
    layer.__class__ = converted = type(like)
    vars(layer).update(settings)

    def undo() -> None:
        if not isinstance(layer, converted):
            return
        layer.__class__ = kind
        # What Transformer Engine has added in its forwards goes too.
        for key in {*vars(layer)} - present:
            del vars(layer)[key]
        vars(layer).update(before)

    present = ({*vars(layer)} - {*settings}) | {*before}
    return undo
