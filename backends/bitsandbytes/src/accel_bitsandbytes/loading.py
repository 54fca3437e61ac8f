"""Models loaded quantised: each block is read, quantised, and placed."""

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
from accel_bitsandbytes.converting import cast, exceeds_float16, quantise, require_range, shell
from accel_bitsandbytes.layers import Quantised
from accel_bitsandbytes.parking import park
from accel_bitsandbytes.planning import HOST, DeviceMap, planned
from accel_bitsandbytes.prequantised import parts_of, quantised_names
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
    """Load a model with its linear layers quantised, or quantise one that is loaded.

    Blocks are read, quantised and placed one by one: the peak is the result, a block and a piece of it.
    Layers change in place, so that ties, hooks, training mode and names stay. Quantised weights are frozen,
    other parameters keep their `requires_grad`, and are in `torch_dtype`. `report(model)` says what was
    quantised. An error leaves the model as it was; one without `weights_location` may have some layers
    quantised by then.

    Args:
        model: on the meta device, as `accel_big_models.empty_weights` makes it, or with weights.
        bnb_quantization_config: a `BnbQuantizationConfig`; Accelerate's does too. It is not changed.
        weights_location: a checkpoint as `accel_big_models.load` reads it, which may be quantised already. A
            model with weights needs none.
        device_map: name of module, "" the model, -> device, "cpu" or "disk"; or "auto", which fills devices
            in order. None: the current accelerator, or the CPU without one.
        no_split_module_classes: names of classes whose modules stay whole.
        max_memory: with "auto": place -> bytes it may hold.
        offload_folder: for what goes to disk; None: a temporary one.
        offload_state_dict: means nothing here.

    Returns:
        The model.

    Raises:
        ConfigError: no layer would be quantised, bitsandbytes computes nothing on a device of the map,
            there are no weights, or float16 cannot hold a value.
        CheckpointError: a file is damaged, or is of another model.
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
    if found := quantised_names(sources):
        choice = parts_of(choice, model, config, found)
    made = planned(model, config, choice, device_map, no_split_module_classes, max_memory)
    resident = _resident(made)
    if offload_folder is not None:
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
    whole = nullcontext() if weights_location is None else unchanged_on_error(model)
    with whole, TemporaryDirectory(prefix="accel-bitsandbytes-", dir=offload_folder) as folder:
        cast(model, config, choice)
        _require_range(model, choice, sources)
        if found:
            for name, layer in choice.chosen.items():
                shell(layer, config, {key: sources[f"{name}.{key}"] for key in found[name]})
            load(model, weights_location, made)  # type: ignore[arg-type]
        elif weights_location is not None:
            load(model, weights_location, resident, convert=_converter(choice, config, made, folder))
        else:
            for name, layer in choice.chosen.items():
                quantise(name, layer, config, _device(resident, name))
        if not found:
            undo(model)
            dispatch(model, made, folder=offload_folder)
    for module in model.modules():
        if isinstance(module, Quantised):
            module.link()
    if len(made.used) == 1 and "disk" not in made.used:
        undo(model)  # which leaves all weights where they are
    _note(model, config, choice, made)
    return model


def _converter(choice: Choice, config: Any, made: Plan, folder: str) -> Callable[[str, nn.Module], nn.Module]:
    """Return a function that quantises one block of the model."""
    names = {layer: name for name, layer in choice.chosen.items()}

    def convert(_: str, block: nn.Module) -> nn.Module:
        for module in block.modules():
            name = names.get(module)  # type: ignore[call-overload]
            if name is not None:
                quantise(name, module, config, module.weight.device)  # type: ignore[arg-type]
                if made.place_of(f"{name}.weight") == "disk":
                    park(module, folder)
        return block

    return convert


def _resident(made: Plan) -> Plan:
    """Return the plan in which parts that come and go are on the CPU for good."""
    places = tuple(evolve(part, place="cpu") if part.place in HOST else part for part in made.places)
    return evolve(made, places=places, device=torch.device("cpu"))


def _require_range(model: nn.Module, choice: Choice, sources: Mapping[str, Any]) -> None:
    """Raise ConfigError if float16 cannot hold a checkpoint's other weights."""
    packed = {layer.weight for layer in choice.chosen.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        source = sources.get(name)
        if source is None or parameter.dtype is not torch.float16 or parameter in packed:
            continue
        if not exceeds_float16(source.dtype):
            continue  # and need not be read
        values = source.tensor()
        if values is None:
            values = torch.empty(source.shape, dtype=source.dtype)
            source.read(values)
        require_range([(name, values)])


def _device(resident: Plan, name: str) -> torch.device:
    return torch.device(resident.place_of(f"{name}.weight"))


def _note(model: Any, config: Any, choice: Choice, made: Plan) -> None:
    """Leave the attributes that libraries look at, and our own for `report`."""
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = config.load_in_8bit, config.load_in_4bit
    model.bitsandbytes_choice = choice
    model.hf_device_map = made.device_map
    for name, why in choice.skipped.items():
        if why.startswith("named in the config"):
            _logger.warning("%s: %s", name, why)
