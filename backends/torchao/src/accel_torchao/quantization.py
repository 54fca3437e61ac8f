"""Quantised weights, for inference and for training adapters."""

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
"""Schemes quantise weights only, or with "dynamic" also the activations in each forward."""


def quantize(model: nn.Module, scheme: Any, *, only: str | None = None, skip: str | None = None) -> nn.Module:
    """Quantise the weights of a model's linear layers in place, and return the model.

    Call it before `prepare`. Quantised weights are frozen. `accelerator.save_state` and
    `save_model(..., safe_serialization=False)` store them quantised; `load_quantized` reads the latter.

    Args:
        model: on any device, the meta device included. Layers with a tied weight are not quantised.
        scheme: a word of `SCHEMES`, or a config of torchao for `quantize_`.
        only: pattern of the whole names of the layers to quantise; None: all.
        skip: pattern of the whole names of layers that are not quantised.

    Raises:
        ConfigError: the scheme is unknown, no layer is selected, or torchao cannot apply the scheme here. An
            out-of-memory error is raised unchanged.
    """
    return quantizer(model, scheme, only=only, skip=skip)("", model)


def quantizer(
    model: nn.Module, scheme: Any, *, only: str | None = None, skip: str | None = None
) -> Callable[[str, nn.Module], nn.Module]:
    """Return a function that quantises one block of a model: (name, block) -> block.

    It is an argument for `load` of accel-big-models: `load(model, checkpoint, plan, convert=quantizer(model,
    "int8"))` reads each block and quantises it on its device, so only one block has weights of full size.

    Args:
        model: the model, of which only shapes and ties are read; it may be on the meta device.
        scheme: see `quantize`.
        only: see `quantize`.
        skip: see `quantize`.

    Raises:
        ConfigError: see `quantize`.
    """
    config = _config(scheme)
    chosen = _layers(model, only, skip)
    if not chosen:
        raise ConfigError(
            f"quantize: no linear layer of the {type(model).__name__} is selected"
            f" (only {only!r}, skip {skip!r})\n"
            "use patterns of whole names of named_modules(), and untie the weights of layers to quantise"
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
        if is_out_of_memory(error):  # another scheme would not help
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"quantize: scheme {scheme!r} cannot be used here: {type(error).__name__}: {reason}\n"
            f"choose another: {', '.join(SCHEMES)}"
        ) from error
    _freeze(block)


def load_quantized(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Load the files of `save_model` into a model of the same class, quantised weights included.

    The model need not be quantised, and may be on the meta device. If an error is raised, the model is not
    changed.

    Raises:
        ConfigError: the folder has no `pytorch_model*.bin`.
        CheckpointError: a file is damaged, missing, or of another model.
    """
    files = sorted(Path(folder).glob("pytorch_model*.bin"))
    if not files:
        raise ConfigError(
            f"load_quantized: {folder} has no pytorch_model*.bin\n"
            "save with accelerator.save_model(model, folder, safe_serialization=False)"
        )
    _library()  # the import registers the classes of torchao's tensors with torch.load
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state.update(torch.load(file, weights_only=True))
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}\ncopy it again", path=str(file)) from error
    _compare(model, state, folder)
    ties = _ties(model)
    # With assign=True each name gets its own parameter, so ties are restored afterwards.
    model.load_state_dict(state, assign=True)
    for first, others in ties:
        for module, key in others:
            setattr(module, key, model.get_parameter(first))
    _freeze(model)
    return model


def _compare(model: nn.Module, state: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Raise CheckpointError unless the model and the files have the same names and shapes."""
    expected: dict[str, Any] = model.state_dict()
    persistent = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    problems = [f"the files lack {name}" for name in expected if name not in state]
    problems += [f"the model lacks {name}" for name in state if name not in expected]
    problems += [
        f"{name} has shape {list(state[name].shape)}, and the model's {list(tensor.shape)}"
        for name, tensor in expected.items()
        if isinstance(tensor, Tensor) and name in state and state[name].shape != tensor.shape
    ]
    problems += [
        f"{name} is on the meta device, and no checkpoint has it"
        for name, buffer in model.named_buffers()
        if buffer.is_meta and id(buffer) not in persistent
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{os.fspath(folder)} does not fit this {type(model).__name__}: {'; '.join(problems[:8])}{more}\n"
            "use all files of the model that was saved; accel_big_models.empty_weights() keeps buffers real",
            path=os.fspath(folder),
        )


def _library() -> Any:
    with warnings.catch_warnings():
        # At its import torchao warns about kernels that this machine does not have.
        warnings.simplefilter("ignore")
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
    """Return name -> layer to quantise; layers with a tied weight are left out, or the tie would break."""
    for argument, pattern in (("only", only), ("skip", skip)):
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ConfigError(
                f"quantize: {argument}={pattern!r} is not a regular expression: {error}\nescape it, or fix it"
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
    """Return (first name, other (module, key) that hold it) for each tied parameter."""
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
