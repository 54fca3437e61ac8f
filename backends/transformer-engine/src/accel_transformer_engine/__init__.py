"""float8 training by Transformer Engine.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_transformer_engine.config import TransformerEngineConfig

__all__ = ["TransformerEngineConfig"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_transformer_engine' has no attribute {name!r}", name=name)
    return getattr(import_module("accel_transformer_engine.config"), name)
