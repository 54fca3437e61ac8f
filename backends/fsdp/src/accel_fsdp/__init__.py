"""Sharded models on torch's FSDP: a strategy plugin of accel-core.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_fsdp.config import FullyShardedDataParallelPlugin
    from accel_fsdp.tensor.config import TorchTensorParallelPlugin

__all__ = ["FullyShardedDataParallelPlugin", "TorchTensorParallelPlugin"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_fsdp' has no attribute {name!r}", name=name)
    from accel_fsdp import config
    from accel_fsdp.tensor import config as tensor_config

    return getattr(tensor_config if name == "TorchTensorParallelPlugin" else config, name)
