"""Linear layers of bitsandbytes whose statistics are buffers.

bitsandbytes stores the scales of a quantised weight in attributes, so checkpoints, exports and offloading do
not see them. In these classes each scale is a buffer under the key that bitsandbytes writes into a state
dict, such as `weight.absmax`, and the attributes refer to the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn

from accel_core import AccelError

__all__ = ["OFFSET", "Linear4", "Linear8", "Quantised", "is_layout"]

OFFSET: Final = "weight.offset"
"""Buffer with the mean of quantised scales; in state dicts it is part of the layout."""
_LAYOUT_SIZE: Final = 256
"""Bytes of a layout. Layouts are padded with blanks, so that a loaded layout fits into any other."""


def is_layout(name: str) -> bool:
    """Return True for the name of a layout: the bytes of JSON that describe a 4-bit weight."""
    return ".quant_state.bitsandbytes__" in name


class Quantised(nn.Linear):
    """A linear layer with a quantised, frozen weight and statistics in buffers."""

    weight: Any
    bias: Any
    _buffers: dict[str, Any]

    def take_statistics(self) -> None:
        """Make buffers of the statistics in bitsandbytes' attributes; none if the weight is not quantised."""
        raise NotImplementedError

    def link(self) -> None:
        """Make the attributes that bitsandbytes reads refer to the buffers."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the layer; statistics and packed weights keep their dtypes."""
        weight, statistics = self.weight, dict(self._buffers)
        if statistics and weight.is_floating_point():
            changed = fn(torch.empty(0, dtype=weight.dtype, device=weight.device)).dtype
            if changed != weight.dtype:
                raise AccelError(
                    f"the weight of a {type(self).__name__} holds packed 4-bit values as {weight.dtype} and"
                    f" cannot be cast to {changed}\nchange the dtype of the other modules only"
                )
        # Module._apply would also cast the buffers, so they are moved separately.
        self._buffers.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in statistics.items():
            assert tensor is not None
            moved = fn(tensor)
            self._buffers[name] = moved if moved.dtype == tensor.dtype else tensor.to(moved.device)
        self.link() if statistics else self.take_statistics()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":  # peft sets a new weight when it merges an adapter
            self._buffers.clear()
            self.take_statistics()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.link()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        destination.pop(prefix + OFFSET, None)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.dtype != self.weight.dtype:
            error_msgs.append(
                f"{prefix}weight is {weight.dtype} in the state dict and quantised as {self.weight.dtype} in"
                " the model: load it with load_and_quantize_model"
            )
            return
        tensors = {name: tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
        for name in list(tensors):
            if is_layout(name):
                tensors[name] = pad_layout(tensors[name])
                if OFFSET in self._buffers:
                    tensors[prefix + OFFSET] = _quant_state(_state_parts(tensors, prefix)).offset
        unexpected: list[str] = []
        # torch's method, because bitsandbytes' own method looks for the scales in attributes.
        nn.Module._load_from_state_dict(
            self, tensors, prefix, local_metadata, strict, missing_keys, unexpected, error_msgs
        )
        unexpected_keys.extend(name for name in unexpected if name[len(prefix) :] not in self._buffers)
        self.link()

    def _guard_weight(self, output: Tensor) -> Tensor:
        """Make backward raise if the weight was moved since the forward, and return the output.

        Offloading replaces the weight's storage, and backward would compute with other numbers.
        """
        if output.requires_grad:
            output.register_hook(partial(_require_weight, self.weight, self.weight.data_ptr()))
        return output


class Linear8(Quantised, bnb.nn.Linear8bitLt):  # type: ignore[misc]
    """A linear layer with a weight in int8 and a scale per row (LLM.int8)."""

    state: Any

    def take_statistics(self) -> None:
        """Make a buffer of the scales; none if the weight is not quantised."""
        scales = getattr(self.weight, "SCB", None)
        if scales is not None:
            self._buffers["SCB"] = scales
            self.link()

    def link(self) -> None:
        """Make the weight and its state refer to the scales."""
        scales = self._buffers.get("SCB")
        if scales is not None and not scales.is_meta:
            self._buffers.setdefault(
                "weight_format", torch.zeros((), dtype=torch.uint8, device=scales.device)
            )
            self.weight.CB, self.weight.SCB = None, scales
            self.state.CB, self.state.SCB = None, scales

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in int8, and outliers of `x` in float16."""
        state = self.state
        state.CB, state.is_training = self.weight.data, self.training
        bias = None if self.bias is None else self.bias.to(x.dtype)
        output: Tensor = bnb.matmul(x, self.weight, bias=bias, state=state)
        return self._guard_weight(output)


class Linear4(Quantised, bnb.nn.Linear4bit):  # type: ignore[misc]
    """A linear layer with a weight of 4-bit values and a scale per block of values."""

    compute_dtype: torch.dtype | None
    compute_type_is_set: bool
    set_compute_type: Any

    def take_statistics(self) -> None:
        """Make buffers of the parts of the weight's `quant_state`."""
        state = getattr(self.weight, "quant_state", None)
        if state is None:
            return
        for key, tensor in state.as_dict(packed=True).items():
            # Copied, because layers of bitsandbytes share some of these tensors.
            self._buffers[f"weight.{key}"] = tensor.to(state.absmax.device, copy=True)
        self.link()

    def link(self) -> None:
        """Build the weight's `quant_state` from the buffers."""
        parts = _state_parts(self._buffers, "")
        if parts and not any(tensor.is_meta for tensor in parts.values()):
            layout = next(name for name in self._buffers if is_layout(name))
            self._buffers[layout] = pad_layout(self._buffers[layout])
            state = _quant_state(parts)
            if state.nested:
                state.offset = self._buffers.setdefault(OFFSET, state.offset)
            self.weight.quant_state = self.quant_state = state
            self.weight.bnb_quantized = True

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in the compute dtype, and return the product in the dtype of `x`.

        bitsandbytes' own forward rewrites the weight for inference on some CPUs. This method does not, so the
        weight and its state in checkpoints always have the same layout.
        """
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        dtype = x.dtype
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        output: Tensor = bnb.matmul_4bit(x, self.weight, bias=bias, quant_state=self.weight.quant_state)
        return self._guard_weight(output).to(dtype)


def pad_layout(layout: Tensor) -> Tensor:
    """Return the layout with blanks up to the common size."""
    if layout.numel() >= _LAYOUT_SIZE:
        return layout
    return torch.cat([layout, layout.new_full((_LAYOUT_SIZE - layout.numel(),), ord(" "))])


def _state_parts(tensors: Any, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a `quant_state`, by names without the layer's prefix."""
    start = f"{prefix}weight."
    return {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith(start) and name != prefix + OFFSET
    }


def _quant_state(parts: dict[str, Tensor]) -> QuantState:
    return QuantState.from_dict(dict(parts), device=parts["absmax"].device)


def _require_weight(weight: nn.Parameter, address: int, gradient: Tensor) -> None:
    if weight.data_ptr() != address:
        raise AccelError(
            f"backward needs a quantised weight of {list(weight.shape)} {weight.dtype} that was moved from"
            f" {gradient.device} since the forward\n"
            "train adapters with all quantised layers on the device: name no cpu or disk in the device map"
        )
