"""Conversion of linear layers to torchao's float8 layers, in place, and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import nn

from accel_core import AccelError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from accel_torchao.config import Float8Config

__all__ = ["convert", "library_config", "refuse_scaled_inputs", "try_recipe"]

TILE = 16
"""Dimensions of a GPU's float8 product must be multiples of this number."""


def _convert_layer(layer: nn.Linear, library: Any) -> nn.Linear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own import, for kernels that this machine lacks
        from torchao.float8 import convert_to_float8_training

    converted: nn.Linear = convert_to_float8_training(layer, config=library)
    return converted


def library_config(config: Float8Config) -> Any:
    """Return torchao's `Float8LinearConfig` for the options."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # see above
        from torchao.float8 import Float8LinearConfig

    if config.config is not None:
        return config.config
    recipe = Float8LinearConfig.from_recipe_name(config.recipe)
    return replace(recipe, pad_inner_dim=config.pad_inner_dim, emulate=config.emulate)


def try_recipe(library: Any, device: torch.device, asked: str) -> None:
    """Train one small layer on the device, and raise if it fails.

    Raises:
        ConfigError: the chip, or this torch on it, cannot compute the recipe; with torch's reason.
    """
    layer = nn.utils.skip_init(nn.Linear, TILE, TILE, bias=False, device=device, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    plain = replace(library, enable_fsdp_float8_all_gather=False)
    x = torch.ones(TILE, TILE, device=device, dtype=torch.bfloat16, requires_grad=True)
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            _convert_layer(layer, plain)(x).sum().backward()
    except Exception as error:  # torch and torchao raise errors of any class if a kernel is missing
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{asked}: {device} cannot compute it: {type(error).__name__}: {reason}\n"
            "choose another fp8_torchao.recipe, or set fp8_torchao.emulate: true to compute it without float8"
        ) from error


def convert(
    model: nn.Module, chosen: Mapping[str, nn.Linear], library: Any, kind: str
) -> list[Callable[[], None]]:
    """Convert the chosen layers to float8 in place, and return functions that undo it.

    A layer stays the same object, with its parameters, hooks, training mode and attributes. Weights that are
    gathered in float8 (`enable_fsdp_float8_all_gather`) become new parameters, which is not undone. Tied
    weights stay as they are: a new parameter per layer would break the tie.

    Args:
        model: the model, in which ties are searched.
        chosen: name -> layer to convert.
        library: torchao's Float8LinearConfig.
        kind: the device type whose autocast casts the input.
    """
    tied: set[Tensor] = _tied_parameters(model) if library.enable_fsdp_float8_all_gather else set()
    whole = replace(library, enable_fsdp_float8_all_gather=False)
    undo: list[Callable[[], None]] = []
    for name, layer in chosen.items():
        converted = _convert_layer(layer, whole if layer.weight in tied else library)
        undo.append(_become(layer, converted))
        checks = kind != "cpu" and not library.emulate
        hook = layer.register_forward_pre_hook(_CastInput(name, kind, checks=checks), with_kwargs=True)
        undo.append(hook.remove)
    return undo


def refuse_scaled_inputs(chosen: Mapping[str, nn.Linear], library: Any) -> list[Callable[[], None]]:
    """Add hooks that raise in the first forward if an input is already in float8 with one scale.

    torchao's parallel styles cast inputs with one scale per tensor even if the recipe has a scale per row.
    The products would silently have the wrong scales. Returns functions that remove the hooks.
    """
    if library.cast_config_input.scaling_granularity.name != "AXISWISE":
        return []
    return [_refuse_scaled_input(name, layer) for name, layer in chosen.items()]


def _refuse_scaled_input(name: str, layer: nn.Linear) -> Callable[[], None]:
    from torchao.float8.distributed_utils import tensor_already_casted_to_fp8

    def check_input(_: nn.Module, args: Any) -> None:
        handle.remove()
        if tensor_already_casted_to_fp8(args[0]):
            raise ConfigError(
                f"fp8-torchao: layer {name} gets an input that is in float8 with one scale, as torchao's"
                " parallel styles cast it, and the recipe has a scale for each row\n"
                "set fp8_torchao.recipe: tensorwise, or use torch's ColwiseParallel and RowwiseParallel"
            )

    handle = layer.register_forward_pre_hook(check_input)
    return handle.remove


def _become(layer: nn.Linear, converted: nn.Linear) -> Callable[[], None]:
    """Give a layer the class and the settings of its converted copy; return a function that undoes it."""
    plain = vars(nn.Linear(1, 1, device="meta"))
    settings = {key: value for key, value in vars(converted).items() if key not in plain}
    before = {key: value for key, value in vars(layer).items() if key in settings}
    layer.__class__ = type(converted)
    vars(layer).update(settings)
    if converted.weight is not layer.weight:
        vars(converted.weight).update(vars(layer.weight))
        layer.weight = converted.weight
        return lambda: None

    def undo() -> None:
        layer.__class__ = nn.Linear
        for key in settings:
            vars(layer).pop(key, None)
        vars(layer).update(before)

    return undo


def _tied_parameters(model: nn.Module) -> set[Tensor]:
    named = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    return {parameter for parameter in named if sum(other is parameter for other in named) > 1}


@frozen(eq=False)
class _CastInput:
    """A forward pre-hook that casts the input as autocast does for an ordinary layer.

    torchao's own layers do so on CUDA only.

    Attributes:
        name: name of the layer.
        kind: device type whose autocast is read.
        checks: refuse numbers of tokens that a GPU's product for the weight's gradient does not support.
    """

    name: str
    kind: str
    checks: bool

    def __call__(self, layer: Any, args: Any, kwargs: Any) -> Any:
        if not args:  # the caller passed the input by name
            args, kwargs = (kwargs["input"],), {}
        x: Tensor = args[0]
        if torch.is_autocast_enabled(self.kind):
            x = x.to(torch.get_autocast_dtype(self.kind))
        if self.checks and torch.is_grad_enabled() and layer.weight.requires_grad:
            self._check(layer.config, x)
        return (x,), {}

    def _check(self, library: Any, x: Tensor) -> None:
        tokens = x.numel() // x.shape[-1]
        high = library.cast_config_input_for_grad_weight.scaling_type.name == "DISABLED"
        if tokens % TILE and not library.pad_inner_dim and not high:
            raise AccelError(
                f"fp8-torchao: layer {self.name or 'the model'} gets {tokens} tokens (shape {list(x.shape)}),"
                f" and the gradient of its weight needs a multiple of {TILE} tokens\n"
                "set fp8_torchao.pad_inner_dim: true, or use batches with such a number of tokens"
            )
