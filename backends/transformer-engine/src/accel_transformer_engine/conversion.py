"""Conversion of layers to Transformer Engine's layers, in place, and back."""

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
    """Convert the chosen layers to Transformer Engine in place, and return functions that undo it.

    A layer stays the same object, with its parameters, hooks, training mode and attributes.

    Args:
        chosen: name -> layer to convert.
        te: the module `transformer_engine.pytorch`.
        inputs_of: name of a linear layer -> the preparation of its inputs.
    """
    undo = []
    for name, layer in chosen.items():
        like = _build_like(layer, te)
        settings = {"_inputs": inputs_of(name)} if isinstance(layer, nn.Linear) else {}
        undo.append(_become(layer, like, settings))
    return undo


def fuse(model: nn.Module, fused: Mapping[str, Callable[..., Any]]) -> tuple[list[str], list[Undo]]:
    """Replace modules by the results of the user's functions.

    Returns:
        The names of the modules, and functions that undo the replacement.

    Raises:
        ConfigError: a pattern matches no module.
    """
    names: list[str] = []
    undo: list[Undo] = []
    for pattern, build in fused.items():
        matches = [name for name, _ in model.named_modules() if name and re.fullmatch(pattern, name)]
        if not matches:
            raise ConfigError(
                f"fp8_te.fused: no module of the {type(model).__name__} has a name like {pattern!r}\n"
                "use a pattern of whole names of named_modules()"
            )
        for name in matches:
            before = model.get_submodule(name)
            undo += _replace(model, before, build(before))
            names.append(name)
    return names, undo


def _replace(model: nn.Module, before: nn.Module, after: nn.Module) -> list[Undo]:
    """Replace a module in all parents that hold it."""
    places = [
        (parent, key)
        for parent in model.modules()
        for key, child in parent._modules.items()
        if child is before
    ]
    for parent, key in places:
        setattr(parent, key, after)
    return [partial(setattr, parent, key, before) for parent, key in places]


def watch(model: nn.Module, inputs_of: Callable[[str], Inputs]) -> list[Undo]:
    """Add the checks of converted layers to fused layers and to the user's own layers of the library."""
    undo: list[Undo] = []
    for name, layer in model.named_modules():
        is_te = type(layer).__module__.startswith("transformer_engine.")
        if is_te and isinstance(getattr(layer, "fp8_meta", None), dict):
            inputs = inputs_of(name)
            undo.append(layer.register_forward_pre_hook(inputs.before).remove)
            undo.append(layer.register_forward_hook(inputs.after).remove)
    return undo


def drop_extra_state(model: nn.Module) -> list[Undo]:
    """Keep Transformer Engine's pickled state out of `state_dict`, also for the user's own layers.

    Checkpoints hold the scales and histories of these layers as tensors instead (module `scaling`).
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
    """Return a subclass without `_extra_state`. Pickle cannot find this class by name, so it is refused."""
    plain = {name: getattr(nn.Module, name) for name in ("get_extra_state", "set_extra_state")}
    copies = {"__deepcopy__": _deepcopy, "__reduce_ex__": _refuse_pickle}
    return type(kind.__name__, (kind,), {**plain, **copies, "__module__": __name__})


def _deepcopy(layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a layer as `copy.deepcopy` does for classes that can be pickled."""
    copied: nn.Module = type(layer).__new__(type(layer))
    memo[id(layer)] = copied
    copied.__setstate__(deepcopy(vars(layer), memo))
    return copied


def _refuse_pickle(layer: nn.Module, _protocol: Any) -> Any:
    raise AccelError(
        f"a {type(layer).__name__} that fp8-te has converted cannot be pickled: only this process has its"
        " class\n"
        "save accelerator.get_state_dict(model), or pickle the model after accelerator.end_training()"
    )


def _has_extra_state(kind: type[nn.Module]) -> bool:
    return kind.get_extra_state is not nn.Module.get_extra_state


@cache
def _classes(te: Any) -> dict[type[nn.Module], type[nn.Module]]:
    """Return torch's class -> the class of its converted layers."""
    prepared = import_module("accel_transformer_engine.inputs").prepared
    linear = type("Linear", (prepared(te.Linear),), {"__module__": __name__})
    classes = {nn.Linear: linear, nn.LayerNorm: te.LayerNorm, nn.RMSNorm: te.RMSNorm}
    return {kind: without_extra_state(converted) for kind, converted in classes.items()}


def _build_like(layer: nn.Module, te: Any) -> nn.Module:
    """Return a layer of Transformer Engine with the same shape, on the meta device."""
    kind = _classes(te)[type(layer)]
    dtype = layer.get_parameter("weight").dtype
    if isinstance(layer, nn.Linear):
        bias = layer.bias is not None
        return kind(layer.in_features, layer.out_features, bias=bias, params_dtype=dtype, device="meta")
    assert isinstance(layer, (nn.LayerNorm, nn.RMSNorm))
    return kind(layer.normalized_shape, eps=layer.eps, dtype=dtype, device="meta")


def _become(layer: nn.Module, like: nn.Module, more: Mapping[str, Any]) -> Undo:
    """Give a layer the class and the settings of `like`, but not its parameters; return the undo function."""
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
        # Attributes that Transformer Engine added in its forwards are removed too.
        for key in {*vars(layer)} - present:
            del vars(layer)[key]
        vars(layer).update(before)

    present = ({*vars(layer)} - {*settings}) | {*before}
    return undo
