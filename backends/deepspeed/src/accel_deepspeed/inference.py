"""Forwards under `torch.inference_mode` of a model whose weights are sharded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["run_without_graph"]


def run_without_graph(model: nn.Module) -> Callable[[], None]:
    """Run forwards of the model under `inference_mode` as under `no_grad`.

    The returned function ends it. Weights that DeepSpeed gathers and releases under `inference_mode` are
    inference tensors from then on, through which torch computes no gradient.
    """
    entered: list[ExitStack] = []

    def enter(*call: Any) -> None:
        entered.append(ExitStack())
        if torch.is_inference_mode_enabled():
            entered[-1].enter_context(torch.inference_mode(False))
            entered[-1].enter_context(torch.no_grad())

    def leave(*call: Any) -> None:
        if entered:  # torch calls this hook even if a hook before `enter` failed
            entered.pop().close()

    first = model.register_forward_pre_hook(enter, prepend=True)
    last = model.register_forward_hook(leave, always_call=True)

    def end() -> None:
        first.remove()
        last.remove()

    return end
