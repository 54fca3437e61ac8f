"""Quantisation of linear layers in place: each stays the same object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from accel_bitsandbytes.choosing import Choice, is_named
from accel_bitsandbytes.layers import Linear4, Linear8
from accel_core import ConfigError

__all__ = ["become", "cast", "exceeds_float16", "outline", "quantise", "require_range", "shell"]

PIECE: Final = 2**18
"""Elements that a CPU quantises together: whole blocks, which have a scale each."""


def quantise(name: str, layer: nn.Linear, config: Any, device: torch.device) -> None:
    """Quantise the layer's weight on a device, and keep it there.

    The layer keeps its identity, hooks, training mode and attributes, and its bias whether it trains.

    Raises:
        ConfigError: the weight has values that the quantised one cannot hold.
    """
    weight = layer.weight.detach().to(device)
    made, scales = (_in_8bit if config.load_in_8bit else _in_4bit)(weight, config)
    if not bool(scales.float().isfinite().all()):
        raise ConfigError(
            f"{name}.weight has values that are not finite in"
            f" {torch.float16 if config.load_in_8bit else config.torch_dtype}\n"
            f"mend the checkpoint, or leave the layer as it is: skip_modules=[{name!r}, ...]"
        )
    become(layer, config)
    if layer.bias is not None:
        layer.bias.data = layer.bias.data.to(device)
    layer.weight = made


def become(layer: nn.Linear, config: Any) -> None:
    """Make the layer one of bitsandbytes, with the weight that it has.

    A weight that is not on the meta device is quantised when the layer is moved, to any device.
    """
    sizes, weight = (layer.in_features, layer.out_features, layer.bias is not None), layer.weight.detach()
    if config.load_in_8bit:
        threshold = config.llm_int8_threshold
        kind: Any = Linear8
        model = kind(*sizes, has_fp16_weights=False, threshold=threshold, device="meta")
        made = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        dtype, nested = config.bnb_4bit_compute_dtype, config.bnb_4bit_use_double_quant
        storage = storage_of(config)
        kind = Linear4
        model = kind(*sizes, dtype, nested, config.bnb_4bit_quant_type, storage, device="meta")
        made = bnb.nn.Params4bit(
            weight,
            requires_grad=False,
            compress_statistics=nested,
            quant_type=config.bnb_4bit_quant_type,
            quant_storage=storage,
        )
    known = vars(layer)
    layer.__class__ = type(model)
    known.update({key: value for key, value in vars(model).items() if key not in known})
    layer._parameters["weight"] = made


def outline(layer: nn.Linear, config: Any) -> None:
    """Make a layer on the meta device as large as it is once it is quantised."""
    count = layer.weight.numel()
    become(layer, config)
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


def shell(layer: nn.Linear, config: Any, parts: Mapping[str, Any]) -> None:
    """Make a layer on the meta device one that a checkpoint has quantised already.

    parts: name in the layer -> what the checkpoint has for it, with `shape` and `dtype`.
    """
    become(layer, config)
    for name, part in parts.items():
        empty = torch.empty(part.shape, dtype=part.dtype, device="meta")
        if name == "weight":
            layer.weight.data = empty
        elif name != "bias":
            layer._buffers[name] = empty


def cast(model: nn.Module, config: Any, choice: Choice) -> None:
    """Give the parameters of other modules, and biases, their dtype.

    Raises:
        ConfigError: float16 cannot hold a value; nothing is changed then.
    """
    kept = list(config.keep_in_fp32_modules or ())
    weights = {layer.weight for layer in choice.chosen.values()}
    wide = {
        parameter
        for name, module in model.named_modules()
        if is_named(name, kept)
        for parameter in module.parameters(recurse=False)
    }
    floats = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and (parameter.is_meta or parameter not in weights)
    ]
    if config.torch_dtype is torch.float16:
        require_range((name, parameter) for name, parameter in floats if parameter not in wide)
    for _, parameter in floats:
        parameter.data = parameter.data.to(torch.float32 if parameter in wide else config.torch_dtype)


def exceeds_float16(dtype: torch.dtype) -> bool:
    """Return whether the dtype has numbers that float16 has not."""
    return not dtype.is_floating_point or torch.finfo(dtype).max > torch.finfo(torch.float16).max


def require_range(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise unless float16 can hold all values.

    NaN and infinities are the same there.

    Raises:
        ConfigError: names the first tensor that has others.
    """
    for name, tensor in named:
        if tensor.is_meta or not tensor.numel() or not exceeds_float16(tensor.dtype):
            continue
        values = tensor.detach()
        ends = torch.stack(values.aminmax())  # abs() would be a copy
        if not ends.isfinite().all():  # NaN hides all other values
            ends = values[values.isfinite()]
        if (ends.abs() > torch.finfo(torch.float16).max).any():
            raise ConfigError(
                f"{name} has values that are not finite in torch.float16, its dtype here (torch_dtype)\n"
                "set torch_dtype='bf16', or"
                f" keep_in_fp32_modules=[{name.rpartition('.')[0].rpartition('.')[2]!r}, ...]"
            )


def storage_of(config: Any) -> torch.dtype:
    """Return the dtype that holds 4-bit weights; Accelerate has no field for it."""
    dtype: torch.dtype = getattr(config, "bnb_4bit_quant_storage", torch.uint8)
    return dtype


def _in_8bit(weight: Tensor, config: Any) -> tuple[nn.Parameter, Tensor]:
    found = [
        bnb.functional.int8_vectorwise_quant(rows.to(config.torch_dtype).to(torch.float16))
        for rows in weight.split(_together(weight, weight.shape[1]))
    ]
    values, scales = (torch.cat([each[number] for each in found]) for number in (0, 1))
    made: nn.Parameter = bnb.nn.Int8Params(values, requires_grad=False, has_fp16_weights=False, SCB=scales)
    return made, scales


def _in_4bit(weight: Tensor, config: Any) -> tuple[nn.Parameter, Tensor]:
    nested, storage = config.bnb_4bit_use_double_quant, storage_of(config)
    values, state = _packed(weight.contiguous().view(-1), config)
    state.shape = weight.shape
    if nested:
        state.offset, state.nested = state.absmax.mean(), True
        state.absmax, state.state2 = bnb.functional.quantize_blockwise(
            state.absmax - state.offset, blocksize=256
        )
    made: nn.Parameter = bnb.nn.Params4bit(
        values,
        requires_grad=False,
        quant_state=state,
        compress_statistics=nested,
        quant_type=config.bnb_4bit_quant_type,
        quant_storage=storage,
        bnb_quantized=True,
    )
    return made, state.state2.absmax if nested else state.absmax


def _packed(weight: Tensor, config: Any) -> tuple[Tensor, Any]:
    """Return a flat weight in 4 bits, and its state with scales that are not nested."""
    found = [
        bnb.functional.quantize_4bit(
            piece.to(config.torch_dtype),
            quant_type=config.bnb_4bit_quant_type,
            quant_storage=storage_of(config),
        )
        for piece in weight.split(_together(weight, 1))
    ]
    state = found[0][1]
    state.absmax = torch.cat([each.absmax for _, each in found])
    return torch.cat([packed for packed, _ in found]), state


def _together(weight: Tensor, size: int) -> int:
    """Return how many parts of a size are quantised together.

    On the CPU the temporaries are several times what is quantised.
    """
    return max(1, (PIECE if weight.device.type == "cpu" else weight.numel()) // max(1, size))
