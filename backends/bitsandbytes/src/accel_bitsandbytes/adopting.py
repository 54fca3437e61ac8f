"""Layers that another loader has quantised, given statistics as buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import bitsandbytes as bnb

from accel_bitsandbytes.layers import Linear4, Linear8, Quantised

if TYPE_CHECKING:
    from torch import nn

__all__ = ["adopt"]

OURS: Final = ((bnb.nn.Linear8bitLt, Linear8), (bnb.nn.Linear4bit, Linear4))


def adopt(model: nn.Module) -> list[str]:
    """Give the bitsandbytes layers of another loader their statistics as buffers.

    In place. Layers that train in float16 (`has_fp16_weights`) stay as they are.

    Returns:
        The names of the layers that were changed.
    """
    adopted = []
    module: Any
    for name, module in model.named_modules():
        ours = next((ours for theirs, ours in OURS if isinstance(module, theirs)), None)
        if ours is None or isinstance(module, Quantised):
            continue
        state = getattr(module, "state", None)
        if state is not None and state.has_fp16_weights:
            continue
        if state is not None and state.SCB is not None:  # after its first forward
            module.weight.SCB = state.SCB
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            module.state_dict()  # which brings the weight back into its usual layout
        module.__class__ = ours
        module.take_statistics()
        adopted.append(name)
    return adopted
