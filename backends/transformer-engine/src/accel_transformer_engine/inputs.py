"""The input of a converted linear layer: its tokens are counted or padded."""

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
    """The preparation of one layer's inputs.

    name: of the layer in the model. unit: has the window with the number of the micro-batch. multiple: of
    tokens that the recipe's products need. padded: the multiple that tokens are padded to; 0: odd ones are
    refused.
    keeps: keep the float8 weights from a window's first micro-batch to its last.
    """

    name: str
    unit: ref[Unit]
    multiple: int
    padded: int
    keeps: bool
    _kept: tuple[int, int, int] | None = None
    _was_float8: bool = False

    def complete(self, x: Tensor) -> tuple[Tensor, int]:
        """Return rows of a number that can be multiplied, and how many of them count.

        0: the input is as it came.
        """
        tokens = x.numel() // x.shape[-1]
        if tokens % self.multiple == 0 and not (self.padded and tokens % self.padded):
            return x, 0
        if not self.padded:
            raise AccelError(
                f"fp8-te: layer {self.name or 'the model'} gets {tokens} tokens (shape {list(x.shape)}), and"
                f" the recipe multiplies numbers of tokens that are multiples of {self.multiple}\n"
                "set fp8_te.pad_tokens: true, or take batches of such a number of tokens"
            )
        return pad(x.reshape(tokens, x.shape[-1]), (0, 0, 0, -tokens % self.padded)), tokens

    def note(self, *, float8: bool) -> None:
        """Note whether a forward is in float8.

        Raises:
            AccelError: it computes a float8 forward again, in another precision.
        """
        if not _in_backward():
            # An evaluation may lie between the forward and its recomputation.
            self._was_float8 |= float8
        elif self._was_float8 and not float8:
            raise AccelError(
                f"fp8-te: layer {self.name or 'the model'} was computed in float8, and is computed again in"
                " the backward in bfloat16: torch's checkpoint does not know of float8\n"
                "recompute by transformer_engine.pytorch.checkpoint, or leave out activation checkpointing"
            )

    def before(self, *_: Any) -> None:
        """Note a forward of a layer that is the library's own."""
        self.note(float8=_is_float8())

    def after(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        """Guard the output of a layer that is the library's own."""
        if isinstance(output, torch.Tensor):
            self.guard(output)

    def guard(self, output: Tensor) -> Tensor:
        """Have a backward that is to be differentiated (create_graph) raise AccelError."""
        if output.requires_grad and not torch.compiler.is_compiling():
            output.register_hook(self._refuse_graph)
        return output

    def _refuse_graph(self, _gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise AccelError(
                f"fp8-te: layer {self.name or 'the model'} gets a backward with create_graph=True:"
                " Transformer Engine's cannot be differentiated, and a penalty on gradients would train"
                " nothing\nkeep the layers that the penalty goes through (fp8_te.skip, fp8_te.only), or take"
                " mixed_precision: bf16"
            )

    def is_first(self, weight: Tensor) -> bool | None:
        """Return whether float8 weights are computed anew; None: nothing is kept."""
        unit = self.unit()
        if unit is None or not self.keeps or not torch.is_grad_enabled() or unit.window.size < 2:
            return None
        # Something else than the optimizer may have written the weight within the window, the layer may sit
        # out a first micro-batch, or compute for another model's loss after the optimizer's step.
        window = unit.window
        is_over = window.boundary and not window.awaits_backward
        now = window.number + (is_over and not _in_backward()), weight.data_ptr(), weight._version
        first = window.index <= 0 or now != self._kept
        self._kept = now
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
            rows, count = self._inputs.complete(_differentiable(input, self))
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
    """Return an input that a checkpointed layer with trainable weights may save.

    The library's function saves more in such a layer's forward than in its recomputation if the input needs
    no gradient, and then fails in backward.
    """
    from transformer_engine.pytorch.distributed import is_fp8_activation_recompute_enabled as in_checkpoint

    if x.requires_grad or not in_checkpoint() or not torch.is_grad_enabled():
        return x
    trains = any(each.requires_grad for each in layer.parameters(recurse=False))
    return x.detach().requires_grad_() if trains else x
