"""float8 training and quantised weights by torchao.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_torchao.config import Float8Config
    from accel_torchao.quantization import load_quantized, quantize, quantizer

__all__ = ["Float8Config", "load_quantized", "quantize", "quantizer"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_torchao' has no attribute {name!r}", name=name)
    module = "config" if name == "Float8Config" else "quantization"
    return getattr(import_module(f"accel_torchao.{module}"), name)
