"""Conversion of layers that another loader has quantised: their statistics become buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import bitsandbytes as bnb

from accel_bitsandbytes.layers import Linear4, Linear8, Quantised

if TYPE_CHECKING:
    from torch import nn

__all__ = ["adopt"]

CLASSES: Final = ((bnb.nn.Linear8bitLt, Linear8), (bnb.nn.Linear4bit, Linear4))


def adopt(model: nn.Module) -> list[str]:
    """Make buffers of the statistics of bitsandbytes layers that another loader has made, in place.

    Layers that train in float16 (`has_fp16_weights`) are not changed.

    Returns:
        The names of the layers that were changed.
    """
    names = []
    module: Any
    for name, module in model.named_modules():
        converted = next((new for old, new in CLASSES if isinstance(module, old)), None)
        if converted is None or isinstance(module, Quantised):
            continue
        state = getattr(module, "state", None)
        if state is not None and state.has_fp16_weights:
            continue
        # The first forward of an 8-bit layer moves the scales from the weight to `state`.
        if state is not None and state.SCB is not None:
            module.weight.SCB = state.SCB
        # bitsandbytes rewrites 4-bit weights for inference on some CPUs. Its state_dict() restores the
        # layout.
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            module.state_dict()
        module.__class__ = converted
        module.take_statistics()
        names.append(name)
    return names
