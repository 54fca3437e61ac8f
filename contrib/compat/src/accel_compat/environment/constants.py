"""File names, choices and versions that programs written for Accelerate import."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

_VALUES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
globals().update(_VALUES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


STR_OPERATION_TO_FUNC = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)
