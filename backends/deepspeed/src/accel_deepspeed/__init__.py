"""DeepSpeed's ZeRO engines: a strategy plugin of accel-core.

Importing this package imports neither torch, nor DeepSpeed, nor its own modules (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_deepspeed.config import DeepSpeedPlugin
    from accel_deepspeed.hf_config import HfDeepSpeedConfig
    from accel_deepspeed.placeholders import DummyOptim, DummyScheduler
    from accel_deepspeed.strategy import select

__all__ = ["DeepSpeedPlugin", "DummyOptim", "DummyScheduler", "HfDeepSpeedConfig", "select"]
__version__ = "0.1.0"

_HOMES: Final = {
    "DeepSpeedPlugin": "config",
    "DummyOptim": "placeholders",
    "DummyScheduler": "placeholders",
    "HfDeepSpeedConfig": "hf_config",
    "select": "strategy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'accel_deepspeed' has no attribute {name!r}", name=name)
    return getattr(import_module(f"accel_deepspeed.{_HOMES[name]}"), name)
