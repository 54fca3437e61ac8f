"""Quantised weights, for inference and under trained adapters."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_core import CheckpointError, ConfigError, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

__all__ = ["SCHEMES", "load_quantized", "quantize", "quantizer"]

SCHEMES = ("int8", "int8_dynamic", "int4", "int4_dynamic", "float8", "float8_dynamic")
"""Weights only, or activations too, quantised in each forward ("dynamic")."""


def quantize(model: nn.Module, scheme: Any, *, only: str | None = None, skip: str | None = None) -> nn.Module:
    """Quantise the weights of a model's linear layers, and return the model.

    In place, before `prepare`. Such weights are frozen. `accelerator.save_state` stores them as they are, and
    so does `save_model(..., safe_serialization=False)`, from which `load_quantized` reads them.

    Args:
        model: on any device, the meta device included. Layers whose weight is tied stay as they are.
        scheme: a word of `SCHEMES`, or one of torchao's own configs for `quantize_`.
        only: pattern of the whole names of the layers to quantise; None: all.
        skip: pattern of the whole names of layers to leave.

    Raises:
        ConfigError: no such scheme, no layer is left to quantise, or torchao cannot do it here. An error of
            memory that runs out stays as it is.
    """
    return quantizer(model, scheme, only=only, skip=skip)("", model)


def quantizer(
    model: nn.Module, scheme: Any, *, only: str | None = None, skip: str | None = None
) -> Callable[[str, nn.Module], nn.Module]:
    """Return a function that quantises one block of a model: (name, block) -> block.

    accel-big-models loads with it: `load(model, checkpoint, plan, convert=quantizer(model, "int8"))` reads a
    block, quantises it on its device and keeps it there, so that only one block has weights of full size.

    Args:
        model: with shapes and ties; on the meta device it needs no memory.
        scheme: see `quantize`.
        only: see `quantize`.
        skip: see `quantize`.

    Raises:
        ConfigError: as `quantize` does.
    """
    config = _config(scheme)
    chosen = _layers(model, only, skip)
    if not chosen:
        raise ConfigError(
            f"quantize: no linear layer of the {type(model).__name__} is left"
            f" (only {only!r}, skip {skip!r})\n"
            "give patterns of whole names of named_modules(), and untie the weights of layers to quantise"
        )
    layers = set(chosen.values())

    def convert(name: str, block: nn.Module) -> nn.Module:
        if not layers.isdisjoint(block.modules()):
            _quantize(block, config, scheme, layers)
        return block

    return convert


def _quantize(block: nn.Module, config: Any, scheme: Any, layers: AbstractSet[nn.Module]) -> None:
    try:
        _library().quantize_(block, config, filter_fn=lambda module, name: module in layers)
    except (ImportError, AssertionError, RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):  # another scheme would find no more
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"quantize: scheme {scheme!r} cannot be used here: {type(error).__name__}: {reason}\n"
            f"choose another: {', '.join(SCHEMES)}"
        ) from error
    _freeze(block)


def load_quantized(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Load what `save_model` wrote into a model of the same class.

    Quantised weights come back as they were. The model need not be quantised; one on the meta device has
    no other weights. An error leaves the model as it was.

    Raises:
        ConfigError: the folder has no `pytorch_model*.bin`.
        CheckpointError: a file is damaged or missing, or is of another model.
    """
    files = sorted(Path(folder).glob("pytorch_model*.bin"))
    if not files:
        raise ConfigError(
            f"load_quantized: {folder} has no pytorch_model*.bin\n"
            "save with accelerator.save_model(model, folder, safe_serialization=False)"
        )
    _library()  # which tells torch.load what classes its tensors have
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state.update(torch.load(file, weights_only=True))
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}\ncopy it again", path=str(file)) from error
    _compare(model, state, folder)
    ties = _ties(model)
    model.load_state_dict(state, assign=True)  # which gives each name a parameter of its own
    for first, others in ties:
        for module, key in others:
            setattr(module, key, model.get_parameter(first))
    _freeze(model)
    return model


def _compare(model: nn.Module, state: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Raise unless the model's names and shapes are those of the files."""
    mine: dict[str, Any] = model.state_dict()
    kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    problems = [f"the files lack {name}" for name in mine if name not in state]
    problems += [f"the model lacks {name}" for name in state if name not in mine]
    problems += [
        f"{name} has shape {list(state[name].shape)}, and the model's {list(tensor.shape)}"
        for name, tensor in mine.items()
        if isinstance(tensor, Tensor) and name in state and state[name].shape != tensor.shape
    ]
    problems += [
        f"{name} is on the meta device, and no checkpoint has it"
        for name, buffer in model.named_buffers()
        if buffer.is_meta and id(buffer) not in kept
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{os.fspath(folder)} does not fit this {type(model).__name__}: {'; '.join(problems[:8])}{more}\n"
            "give all files of the model that was saved; accel_big_models.empty_weights() keeps buffers real",
            path=os.fspath(folder),
        )


def _library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own import, for kernels that this machine lacks
        from torchao import quantization
    return quantization


def _config(scheme: Any) -> Any:
    if not isinstance(scheme, str):
        return scheme
    if scheme not in SCHEMES:
        raise ConfigError(f"quantize: {scheme!r} is not a scheme\nchoose among {', '.join(SCHEMES)}")
    library, dtypes = _library(), vars(torch)  # torch's own stubs lack int4
    if scheme == "int4":
        return library.IntxWeightOnlyConfig(weight_dtype=dtypes["int4"])
    if scheme == "int4_dynamic":
        return library.Int8DynamicActivationIntxWeightConfig(weight_dtype=dtypes["int4"])
    names = {
        "int8": "Int8WeightOnlyConfig",
        "int8_dynamic": "Int8DynamicActivationInt8WeightConfig",
        "float8": "Float8WeightOnlyConfig",
        "float8_dynamic": "Float8DynamicActivationFloat8WeightConfig",
    }
    return getattr(library, names[scheme])()


def _layers(model: nn.Module, only: str | None, skip: str | None) -> dict[str, nn.Linear]:
    """Return the layers to quantise by name; tied ones would come apart."""
    for given, pattern in (("only", only), ("skip", skip)):
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ConfigError(
                f"quantize: {given}={pattern!r} is not a regular expression: {error}\nescape it, or fix it"
            ) from None
    count: dict[Tensor, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        count[parameter] = count.get(parameter, 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and count.get(module.weight) == 1
        and not bool(is_traceable_wrapper_subclass(module.weight))
        and (only is None or re.fullmatch(only, name))
        and not (skip is not None and re.fullmatch(skip, name))
    }


def _ties(model: nn.Module) -> list[tuple[str, list[tuple[nn.Module, str]]]]:
    """Return each tied parameter: its first name, and the other places that hold it."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    places = [(first, [name.rpartition(".") for name in others]) for first, *others in names.values()]
    return [
        (first, [(model.get_submodule(path), key) for path, _, key in others])
        for first, others in places
        if others
    ]


def _freeze(model: nn.Module) -> None:
    for parameter in model.parameters():
        if is_traceable_wrapper_subclass(parameter):
            parameter.requires_grad_(False)
