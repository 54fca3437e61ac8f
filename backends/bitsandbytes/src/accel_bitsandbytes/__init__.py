"""Models quantised to 8 and 4 bits by bitsandbytes.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_bitsandbytes.adopting import adopt
    from accel_bitsandbytes.choosing import report
    from accel_bitsandbytes.config import BnbQuantizationConfig
    from accel_bitsandbytes.loading import load_and_quantize_model
    from accel_bitsandbytes.options import BitsAndBytesPlugin

_PUBLIC: Final = {
    "BitsAndBytesPlugin": "options",
    "BnbQuantizationConfig": "config",
    "adopt": "adopting",
    "load_and_quantize_model": "loading",
    "report": "choosing",
}

__all__ = ["BitsAndBytesPlugin", "BnbQuantizationConfig", "adopt", "load_and_quantize_model", "report"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'accel_bitsandbytes' has no attribute {name!r}", name=name)
    return getattr(import_module(f"accel_bitsandbytes.{_PUBLIC[name]}"), name)
