"""Models larger than a device: plan, load, stream and undo, without a run.

Importing this package imports neither torch nor its own modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_big_models.casting import layerwise_casting
    from accel_big_models.checkpoints import open_checkpoint
    from accel_big_models.config import DispatchedPlugin
    from accel_big_models.converting import unchanged_on_error
    from accel_big_models.dispatching import dispatch, offload, undo
    from accel_big_models.empty import empty_weights
    from accel_big_models.loading import load
    from accel_big_models.planning import plan, plan_from_map
    from accel_big_models.plans import Place, Plan
    from accel_big_models.weights import weights_of

_PUBLIC: Final = {
    "casting": "layerwise_casting",
    "checkpoints": "open_checkpoint",
    "config": "DispatchedPlugin",
    "converting": "unchanged_on_error",
    "dispatching": "dispatch offload undo",
    "empty": "empty_weights",
    "loading": "load",
    "planning": "plan plan_from_map",
    "plans": "Place Plan",
    "weights": "weights_of",
}
_MODULES: Final = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = [
    "DispatchedPlugin",
    "Place",
    "Plan",
    "dispatch",
    "empty_weights",
    "layerwise_casting",
    "load",
    "offload",
    "open_checkpoint",
    "plan",
    "plan_from_map",
    "unchanged_on_error",
    "undo",
    "weights_of",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'accel_big_models' has no attribute {name!r}", name=name)
    module = __import__(f"accel_big_models.{_MODULES[name]}", fromlist=[name])
    value = globals()[name] = getattr(module, name)
    return value
