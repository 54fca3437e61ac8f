"""Intel GPUs, and Intel's extension for PyTorch: plugins of accel-core.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_xpu.config import IpexConfig, XpuConfig

__all__ = ["IpexConfig", "XpuConfig"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_xpu' has no attribute {name!r}", name=name)
    from accel_xpu import config

    return getattr(config, name)
