"""Models quantised by accel-bitsandbytes, under Accelerate's names."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accel_compat.big_models.device_maps import map_by_word
from accel_compat.configs.low_precision import BnbQuantizationConfig
from accel_compat.packages import load

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "get_keys_to_not_convert",
    "get_parameter_device",
    "get_quantized_model_device_map",
    "load_and_quantize_model",
]


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Any = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Load a model with its linear layers quantised, or quantise one that is loaded.

    The config stays as it is. With 4 bits, modules that a map puts on "cpu" or "disk" beside an
    accelerator are left as they are, as in Accelerate.

    device_map: as `load_checkpoint_and_dispatch` has it. Default: the current accelerator, or the CPU without
    one.
    """
    quantise = _ours("loading:load_and_quantize_model")
    config = bnb_quantization_config
    if isinstance(device_map, dict) and config.load_in_4bit:
        away = [name for name, place in device_map.items() if str(place) in ("cpu", "disk")]
        away = away if len(away) < len(device_map) else []
        skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
        config = replace(config, skip_modules=[*skipped, *away]) if away else config
    if isinstance(device_map, str):
        device_map = get_quantized_model_device_map(
            model, config, device_map, max_memory, no_split_module_classes
        )
    return quantise(  # type: ignore[no-any-return]
        model,
        config,
        weights_location,
        device_map,
        no_split_module_classes,
        max_memory,
        offload_folder,
        offload_state_dict,
    )


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: Any = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
) -> Any:
    """Return a device map by the sizes of the quantised weights."""
    if device_map is None:
        return {"": _ours("planning:usual_device")()}
    if not isinstance(device_map, str):
        return device_map
    small = _ours("planning:quantised_outline")(model, bnb_quantization_config)
    return map_by_word(small, device_map, max_memory, no_split_module_classes)


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the names of the modules that stay by default."""
    names: list[str] = _ours("choosing:default_skip")(model)
    return names


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next(parameter.parameters()).device


def _ours(path: str) -> Any:
    module, _, name = path.partition(":")
    load("accel_bitsandbytes:__version__", "load_and_quantize_model")  # or an error that says what to install
    return load(f"accel_bitsandbytes.{module}:{name}", name)
