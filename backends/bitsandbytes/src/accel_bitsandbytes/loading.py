"""Loading of quantised models: each block is read, quantised and placed before the next block is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch import nn

from accel_big_models import dispatch, load, open_checkpoint, unchanged_on_error, undo
from accel_bitsandbytes.choosing import Choice, choose
from accel_bitsandbytes.config import require_dtype
from accel_bitsandbytes.converting import cast, exceeds_float16, match_checkpoint, quantise, require_range
from accel_bitsandbytes.layers import Quantised
from accel_bitsandbytes.mapping import map_weight
from accel_bitsandbytes.planning import HOST, DeviceMap, make_plan
from accel_bitsandbytes.prequantised import choose_prequantised, quantised_names
from accel_core import ConfigError, get_logger

if TYPE_CHECKING:
    from accel_big_models import Plan

__all__ = ["load_and_quantize_model"]

_logger = get_logger(__name__)


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: Any,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: DeviceMap | str | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,  # weights are never in host memory all at once
) -> nn.Module:
    """Load a model with quantised linear layers, or quantise the linear layers of a loaded model.

    Blocks are read, quantised and placed one by one, so the peak of memory is the result, one block and a
    piece of the block. Layers change in place: ties, hooks, training mode and names stay. Quantised weights
    are frozen. Other parameters keep `requires_grad` and are cast to `torch_dtype`. `report(model)` lists the
    quantised layers. If an error is raised, the model is not changed; without `weights_location` some layers
    may already be quantised.

    Args:
        model: on the meta device, as `accel_big_models.empty_weights` makes it, or with weights.
        bnb_quantization_config: a `BnbQuantizationConfig`, or an object of Accelerate's class; not changed.
        weights_location: a checkpoint for `accel_big_models.load`, which may already be quantised. None for a
            model with weights.
        device_map: name of module ("" for the model) -> device, "cpu" or "disk"; or "auto", which fills
            devices in order. None: the current accelerator, or the CPU without one.
        no_split_module_classes: names of classes whose modules are placed as a whole.
        max_memory: with "auto": place -> maximum number of bytes.
        offload_folder: folder for parts on disk; None: a temporary folder.
        offload_state_dict: has no effect; the parameter exists for programs that pass it to Accelerate.

    Returns:
        The model.

    Raises:
        ConfigError: no layer would be quantised, bitsandbytes does not support a device of the map, there are
            no weights, or float16 cannot represent a value.
        CheckpointError: a file is damaged or of another model.
    """
    config = bnb_quantization_config
    require_dtype(config)
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if is_empty and weights_location is None:
        raise ConfigError(
            f"the {type(model).__name__} is on the meta device, and weights_location is None\n"
            "name the checkpoint that has its weights"
        )
    sources = {} if weights_location is None else open_checkpoint(weights_location)
    choice = choose(model, config)
    # A checkpoint that is already quantised decides which layers are quantised.
    if prequantised := quantised_names(sources):
        choice = choose_prequantised(choice, model, config, prequantised)
    plan = make_plan(model, config, choice, device_map, no_split_module_classes, max_memory)
    resident = _without_offloading(plan)
    if offload_folder is not None:
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
    restored = nullcontext() if weights_location is None else unchanged_on_error(model)
    with restored, TemporaryDirectory(prefix="accel-bitsandbytes-", dir=offload_folder) as folder:
        cast(model, config, choice)
        _require_range(model, choice, sources)
        if prequantised:
            for name, layer in choice.chosen.items():
                match_checkpoint(layer, config, {key: sources[f"{name}.{key}"] for key in prequantised[name]})
            load(model, weights_location, plan)  # type: ignore[arg-type]
        elif weights_location is not None:
            # In `resident` offloaded parts stay on the CPU, so that blocks for the CPU or the disk are
            # quantised on the CPU. `dispatch` below offloads them.
            load(model, weights_location, resident, convert=_converter(choice, config, plan, folder))
        else:
            for name, layer in choice.chosen.items():
                quantise(name, layer, config, _device(resident, name))
        if not prequantised:
            undo(model)
            dispatch(model, plan, folder=offload_folder)
    for module in model.modules():
        if isinstance(module, Quantised):
            module.link()
    # A model on one device needs no hooks that move weights. `undo` removes them and moves nothing.
    if len(plan.used) == 1 and "disk" not in plan.used:
        undo(model)
    _set_attributes(model, config, choice, plan)
    return model


def _converter(choice: Choice, config: Any, plan: Plan, folder: str) -> Callable[[str, nn.Module], nn.Module]:
    """Return a function that quantises the chosen layers of one block: (name, block) -> block."""
    names = {layer: name for name, layer in choice.chosen.items()}

    def convert(_: str, block: nn.Module) -> nn.Module:
        for module in block.modules():
            name = names.get(module)  # type: ignore[call-overload]
            if name is not None:
                quantise(name, module, config, module.weight.device)  # type: ignore[arg-type]
                # A weight for the disk leaves host memory at once, not only when `dispatch` runs at the end.
                if plan.place_of(f"{name}.weight") == "disk":
                    map_weight(module, folder)
        return block

    return convert


def _without_offloading(plan: Plan) -> Plan:
    """Return a plan in which offloaded parts stay on the CPU."""
    places = tuple(evolve(part, place="cpu") if part.place in HOST else part for part in plan.places)
    return evolve(plan, places=places, device=torch.device("cpu"))


def _require_range(model: nn.Module, choice: Choice, sources: Mapping[str, Any]) -> None:
    """Raise ConfigError if float16 cannot represent the checkpoint's weights that are not quantised."""
    packed = {layer.weight for layer in choice.chosen.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        source = sources.get(name)
        if source is None or parameter.dtype is not torch.float16 or parameter in packed:
            continue
        if not exceeds_float16(source.dtype):  # the weight need not be read
            continue
        values = source.tensor()
        if values is None:
            values = torch.empty(source.shape, dtype=source.dtype)
            source.read(values)
        require_range([(name, values)])


def _device(resident: Plan, name: str) -> torch.device:
    return torch.device(resident.place_of(f"{name}.weight"))


def _set_attributes(model: Any, config: Any, choice: Choice, plan: Plan) -> None:
    """Set the attributes that other libraries read, and the attribute for `report`."""
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = config.load_in_8bit, config.load_in_4bit
    model.bitsandbytes_choice = choice
    model.hf_device_map = plan.device_map
    for name, why in choice.skipped.items():
        if why.startswith("named in the config"):
            _logger.warning("%s: %s", name, why)
