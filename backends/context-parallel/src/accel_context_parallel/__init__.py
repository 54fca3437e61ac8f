"""Context parallelism: ranks share each sequence.

An extension plugin of accel-core.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_context_parallel.config import ContextParallelPlugin

__all__ = ["ContextParallelPlugin"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_context_parallel' has no attribute {name!r}", name=name)
    from accel_context_parallel import config

    return getattr(config, name)
