"""Programs written for Accelerate, unchanged, on accel-core.

`install()` makes `import accelerate` mean this package's, in this process and its children; the variable
ACCEL_COMPAT=1 does so for a process from its start. Importing this package imports neither torch nor its own
modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_compat.activation import install
    from accel_compat.sharded_models import adopt

__all__ = ["adopt", "install"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_compat' has no attribute {name!r}", name=name)
    from accel_compat import activation, sharded_models

    return getattr(sharded_models if name == "adopt" else activation, name)
