"""Quantisation of linear layers in place: each layer stays the same object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from accel_bitsandbytes.choosing import Choice, is_named
from accel_bitsandbytes.layers import Linear4, Linear8
from accel_core import ConfigError

__all__ = [
    "cast",
    "convert_class",
    "exceeds_float16",
    "match_checkpoint",
    "quantise",
    "quantise_on_meta",
    "require_range",
]

PIECE: Final = 2**18
"""Number of elements that a CPU quantises in one call; a multiple of the blocks that have a scale."""


def quantise(name: str, layer: nn.Linear, config: Any, device: torch.device) -> None:
    """Quantise the layer's weight on a device and leave it there.

    The layer keeps its identity, hooks, training mode and attributes. Its bias keeps `requires_grad`.

    Raises:
        ConfigError: the weight has values that the quantised weight cannot represent.
    """
    weight = layer.weight.detach().to(device)
    quantised, scales = (_in_8bit if config.load_in_8bit else _in_4bit)(weight, config)
    if not bool(scales.float().isfinite().all()):
        raise ConfigError(
            f"{name}.weight has values that are not finite in"
            f" {torch.float16 if config.load_in_8bit else config.torch_dtype}\n"
            f"repair the checkpoint, or do not quantise the layer: skip_modules=[{name!r}, ...]"
        )
    convert_class(layer, config)
    if layer.bias is not None:
        layer.bias.data = layer.bias.data.to(device)
    layer.weight = quantised


def convert_class(layer: nn.Linear, config: Any) -> None:
    """Make the layer a layer of bitsandbytes with its current weight.

    bitsandbytes quantises a weight that is not on the meta device when the layer is moved to any device.
    """
    sizes, weight = (layer.in_features, layer.out_features, layer.bias is not None), layer.weight.detach()
    if config.load_in_8bit:
        threshold = config.llm_int8_threshold
        kind: Any = Linear8
        model = kind(*sizes, has_fp16_weights=False, threshold=threshold, device="meta")
        parameter = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        dtype, nested = config.bnb_4bit_compute_dtype, config.bnb_4bit_use_double_quant
        storage = storage_of(config)
        kind = Linear4
        model = kind(*sizes, dtype, nested, config.bnb_4bit_quant_type, storage, device="meta")
        parameter = bnb.nn.Params4bit(
            weight,
            requires_grad=False,
            compress_statistics=nested,
            quant_type=config.bnb_4bit_quant_type,
            quant_storage=storage,
        )
    attributes = vars(layer)
    layer.__class__ = type(model)
    attributes.update({key: value for key, value in vars(model).items() if key not in attributes})
    layer._parameters["weight"] = parameter


def quantise_on_meta(layer: nn.Linear, config: Any) -> None:
    """Give a layer on the meta device the shapes and dtypes of a quantised layer, for plans of memory."""
    count = layer.weight.numel()
    convert_class(layer, config)
    if config.load_in_8bit:
        shape, dtype = tuple(layer.weight.shape), torch.int8
        layer._buffers["SCB"] = torch.empty(layer.out_features, device="meta")
    else:
        dtype = storage_of(config)
        shape = (-(-count // (2 * dtype.itemsize)), 1)
        scales = -(-count // 64)
        kind = torch.uint8 if config.bnb_4bit_use_double_quant else torch.float32
        layer._buffers["weight.absmax"] = torch.empty(scales, dtype=kind, device="meta")
    layer.weight.data = torch.empty(shape, dtype=dtype, device="meta")


def match_checkpoint(layer: nn.Linear, config: Any, parts: Mapping[str, Any]) -> None:
    """Give a layer on the meta device the shapes and dtypes of a checkpoint's quantised tensors.

    Args:
        layer: the layer.
        config: the options.
        parts: name in the layer -> the checkpoint's tensor, with `shape` and `dtype`.
    """
    convert_class(layer, config)
    for name, part in parts.items():
        empty = torch.empty(part.shape, dtype=part.dtype, device="meta")
        if name == "weight":
            layer.weight.data = empty
        elif name != "bias":
            layer._buffers[name] = empty


def cast(model: nn.Module, config: Any, choice: Choice) -> None:
    """Cast the parameters of other modules, and biases, to their dtypes.

    Raises:
        ConfigError: float16 cannot represent a value; no parameter was cast.
    """
    fp32_modules = list(config.keep_in_fp32_modules or ())
    weights = {layer.weight for layer in choice.chosen.values()}
    in_fp32 = {
        parameter
        for name, module in model.named_modules()
        if is_named(name, fp32_modules)
        for parameter in module.parameters(recurse=False)
    }
    floats = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and (parameter.is_meta or parameter not in weights)
    ]
    if config.torch_dtype is torch.float16:
        require_range((name, parameter) for name, parameter in floats if parameter not in in_fp32)
    for _, parameter in floats:
        parameter.data = parameter.data.to(torch.float32 if parameter in in_fp32 else config.torch_dtype)


def exceeds_float16(dtype: torch.dtype) -> bool:
    """Return True if the dtype has larger numbers than float16."""
    return not dtype.is_floating_point or torch.finfo(dtype).max > torch.finfo(torch.float16).max


def require_range(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise unless float16 can represent all values; NaN and infinities are accepted.

    Raises:
        ConfigError: with the name of the first tensor that has a value out of range.
    """
    for name, tensor in named:
        if tensor.is_meta or not tensor.numel() or not exceeds_float16(tensor.dtype):
            continue
        values = tensor.detach()
        extremes = torch.stack(values.aminmax())  # abs() of all values would copy the tensor
        if not extremes.isfinite().all():  # the minimum and maximum of values with NaN are NaN
            extremes = values[values.isfinite()]
        if (extremes.abs() > torch.finfo(torch.float16).max).any():
            raise ConfigError(
                f"{name} has values that are not finite in torch.float16, its dtype here (torch_dtype)\n"
                "set torch_dtype='bf16', or"
                f" keep_in_fp32_modules=[{name.rpartition('.')[0].rpartition('.')[2]!r}, ...]"
            )


def storage_of(config: Any) -> torch.dtype:
    """Return the dtype of the tensor with 4-bit weights; Accelerate's config has no such field."""
    dtype: torch.dtype = getattr(config, "bnb_4bit_quant_storage", torch.uint8)
    return dtype


def _in_8bit(weight: Tensor, config: Any) -> tuple[nn.Parameter, Tensor]:
    pieces = [
        bnb.functional.int8_vectorwise_quant(rows.to(config.torch_dtype).to(torch.float16))
        for rows in weight.split(_split_size(weight, weight.shape[1]))
    ]
    values, scales = (torch.cat([piece[number] for piece in pieces]) for number in (0, 1))
    quantised: nn.Parameter = bnb.nn.Int8Params(
        values, requires_grad=False, has_fp16_weights=False, SCB=scales
    )
    return quantised, scales


def _in_4bit(weight: Tensor, config: Any) -> tuple[nn.Parameter, Tensor]:
    nested, storage = config.bnb_4bit_use_double_quant, storage_of(config)
    values, state = _pack(weight.contiguous().view(-1), config)
    state.shape = weight.shape
    if nested:
        # The scales of all pieces are quantised together, as bitsandbytes does for a whole weight.
        state.offset, state.nested = state.absmax.mean(), True
        state.absmax, state.state2 = bnb.functional.quantize_blockwise(
            state.absmax - state.offset, blocksize=256
        )
    quantised: nn.Parameter = bnb.nn.Params4bit(
        values,
        requires_grad=False,
        quant_state=state,
        compress_statistics=nested,
        quant_type=config.bnb_4bit_quant_type,
        quant_storage=storage,
        bnb_quantized=True,
    )
    return quantised, state.state2.absmax if nested else state.absmax


def _pack(weight: Tensor, config: Any) -> tuple[Tensor, Any]:
    """Return a flat weight in 4 bits, and its state with scales that are not quantised."""
    pieces = [
        bnb.functional.quantize_4bit(
            piece.to(config.torch_dtype),
            quant_type=config.bnb_4bit_quant_type,
            quant_storage=storage_of(config),
        )
        for piece in weight.split(_split_size(weight, 1))
    ]
    state = pieces[0][1]
    state.absmax = torch.cat([each.absmax for _, each in pieces])
    return torch.cat([packed for packed, _ in pieces]), state


def _split_size(weight: Tensor, size: int) -> int:
    """Return the number of rows, each of `size` elements, to quantise in one call.

    On the CPU bitsandbytes needs temporaries of several times the size of its input.
    """
    return max(1, (PIECE if weight.device.type == "cpu" else weight.numel()) // max(1, size))
