"""Megatron-core's tensor, pipeline, expert and data parallelism.

A strategy plugin of accel-core.

Importing this package imports neither torch, nor megatron-core, nor its own modules (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_megatron.api import build_model, indexed_loaders, reconfigure, transformer_config
    from accel_megatron.config import MegatronLMPlugin
    from accel_megatron.datasets import indexed_datasets
    from accel_megatron.exchange import export_checkpoint, import_checkpoint
    from accel_megatron.placeholders import MegatronLMDummyScheduler

__all__ = [
    "MegatronLMDummyScheduler",
    "MegatronLMPlugin",
    "build_model",
    "export_checkpoint",
    "import_checkpoint",
    "indexed_datasets",
    "indexed_loaders",
    "reconfigure",
    "transformer_config",
]
__version__ = "0.1.0"

_HOMES: Final = {
    "MegatronLMDummyScheduler": "placeholders",
    "MegatronLMPlugin": "config",
    "build_model": "api",
    "export_checkpoint": "exchange",
    "import_checkpoint": "exchange",
    "indexed_datasets": "datasets",
    "indexed_loaders": "api",
    "reconfigure": "api",
    "transformer_config": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'accel_megatron' has no attribute {name!r}", name=name)
    return getattr(import_module(f"accel_megatron.{_HOMES[name]}"), name)
