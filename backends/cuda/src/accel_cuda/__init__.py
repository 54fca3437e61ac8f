"""CUDA devices: a device plugin of accel-core.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_cuda.affinity import override_numa_affinity, set_numa_affinity
    from accel_cuda.config import CudaConfig

__all__ = ["CudaConfig", "override_numa_affinity", "set_numa_affinity"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_cuda' has no attribute {name!r}", name=name)
    return getattr(import_module(f"accel_cuda.{'config' if name == 'CudaConfig' else 'affinity'}"), name)
