"""Preparation of the inputs of converted linear layers, and checks of their forwards and backwards."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from attrs import define
from torch.nn.functional import pad

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from accel_core import Unit

__all__ = ["Inputs", "prepared"]


@define(eq=False)
class Inputs:
    """Preparation of the inputs of one layer."""

    name: str
    """Name of the layer in the model."""
    unit: ref[Unit]
    """The unit, whose window counts micro-batches."""
    multiple: int
    """The recipe's products need a multiple of this number of tokens."""
    padded: int
    """Inputs are padded to a multiple of this number of tokens; 0: other numbers are refused."""
    keeps: bool
    """Keep the float8 weights from a window's first micro-batch to its last."""
    _last_weight: tuple[int, int, int] | None = None
    """Window, address and version of the weight from which the float8 weight was computed."""
    _was_float8: bool = False

    def pad_tokens(self, x: Tensor) -> tuple[Tensor, int]:
        """Return the input padded as the recipe needs, and its number of tokens; 0 if it was not padded."""
        tokens = x.numel() // x.shape[-1]
        if tokens % self.multiple == 0 and not (self.padded and tokens % self.padded):
            return x, 0
        if not self.padded:
            raise AccelError(
                f"fp8-te: layer {self.name or 'the model'} gets {tokens} tokens (shape {list(x.shape)}), and"
                f" the recipe needs a multiple of {self.multiple}\n"
                "set fp8_te.pad_tokens: true, or use batches with such a number of tokens"
            )
        return pad(x.reshape(tokens, x.shape[-1]), (0, 0, 0, -tokens % self.padded)), tokens

    def note(self, *, float8: bool) -> None:
        """Record a forward and its precision.

        Raises:
            AccelError: the forward recomputes a float8 forward in another precision.
        """
        if not _in_backward():
            # `|=`, because an evaluation in bfloat16 may run between a forward and its recomputation.
            self._was_float8 |= float8
        elif self._was_float8 and not float8:
            raise AccelError(
                f"fp8-te: layer {self.name or 'the model'} was computed in float8, and is computed again in"
                " the backward in bfloat16: torch's checkpoint does not know of float8\n"
                "recompute by transformer_engine.pytorch.checkpoint, or leave out activation checkpointing"
            )

    def before(self, *_: Any) -> None:
        """Record the forward of a layer that was not converted (a forward pre-hook)."""
        self.note(float8=_is_float8())

    def after(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        """Guard the output of a layer that was not converted (a forward hook)."""
        if isinstance(output, torch.Tensor):
            self.guard(output)

    def guard(self, output: Tensor) -> Tensor:
        """Make a backward with create_graph=True raise AccelError, and return the output."""
        if output.requires_grad and not torch.compiler.is_compiling():
            output.register_hook(self._refuse_graph)
        return output

    def _refuse_graph(self, _gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise AccelError(
                f"fp8-te: layer {self.name or 'the model'} gets a backward with create_graph=True:"
                " Transformer Engine's cannot be differentiated, and a penalty on gradients would train"
                " nothing\nleave the layers of the penalty unconverted (fp8_te.skip, fp8_te.only), or use"
                " mixed_precision: bf16"
            )

    def is_first(self, weight: Tensor) -> bool | None:
        """Return True if the float8 weight must be computed again, False if not; None if none is kept."""
        unit = self.unit()
        if unit is None or not self.keeps or not torch.is_grad_enabled() or unit.window.size < 2:
            return None
        # "First micro-batch of the window" is not enough. A script may write the weight within a window, the
        # layer may not run in the first micro-batch, and it may run after the optimizer's step for the loss
        # of another model, before the next window opens. So the weight's address and version are compared
        # too, and a forward after the window's last backward counts as a forward of the next window.
        window = unit.window
        is_over = window.boundary and not window.awaits_backward
        current = window.number + (is_over and not _in_backward()), weight.data_ptr(), weight._version
        first = window.index <= 0 or current != self._last_weight
        self._last_weight = current
        return first


@cache
def prepared(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class whose `forward` takes the input as `torch.nn.Linear` does."""

    class Prepared(kind):  # type: ignore[misc, valid-type]
        _inputs: Inputs

        def forward(self, input: Tensor) -> Tensor:
            float8 = _is_float8()
            self._inputs.note(float8=float8)
            if not float8:
                return self._inputs.guard(super().forward(input))
            rows, count = self._inputs.pad_tokens(_differentiable(input, self))
            first = self._inputs.is_first(self.weight)
            output: Tensor = self._inputs.guard(super().forward(rows, is_first_microbatch=first))
            if not count:
                return output
            return output[:count].view(*input.shape[:-1], output.shape[-1])

    return Prepared


def _is_float8() -> bool:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return bool(FP8GlobalStateManager.is_fp8_enabled())


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _differentiable(x: Tensor, layer: nn.Module) -> Tensor:
    """Return the input, requiring gradients if the layer is checkpointed and has trainable weights.

    If the input needs no gradient, the library saves other tensors in the layer's forward than in its
    recomputation, and then fails in backward.
    """
    from transformer_engine.pytorch.distributed import is_fp8_activation_recompute_enabled as in_checkpoint

    if x.requires_grad or not in_checkpoint() or not torch.is_grad_enabled():
        return x
    trains = any(each.requires_grad for each in layer.parameters(recurse=False))
    return x.detach().requires_grad_() if trains else x
