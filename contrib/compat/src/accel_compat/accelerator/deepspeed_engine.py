"""DeepSpeed's engine, and its config without "auto".

Programs read them after `prepare`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accel_compat.unsupported import NotServedError


class WrappedEngine:
    """Accelerate's holder of the engine of the first model that was prepared."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def get_global_grad_norm(self) -> Any:
        """Return the last step's gradient norm over all ranks; None before the first."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if hasattr(norm, "item") else norm

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Refused: it would step as well."""
        raise NotServedError(
            "deepspeed_engine_wrapped.backward: the run counts micro-batches here, not the engine\n"
            "call accelerator.backward(loss), then optimizer.step()"
        )


def wrapped(units: Iterable[Any]) -> WrappedEngine | None:
    """Return the engine of the first unit that has one."""
    return next((WrappedEngine(unit.wrapped[0]) for unit in units if unit.wrapped), None)


def fill(plugin: Any, units: Iterable[Any]) -> None:
    """Fill "auto" in the plugin's config with the values of these units' engines."""
    for unit in units:
        made = getattr(unit.config, "deepspeed_config", {})
        _fill(plugin.deepspeed_config, made)
        for name in ("fp16", "bf16"):
            if name in made:
                plugin.deepspeed_config.setdefault(name, {"enabled": made[name]["enabled"]})


def _fill(config: dict[str, Any], made: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if isinstance(value, dict):
            _fill(value, made.get(key) or {})
        elif value == "auto" and key in made:
            config[key] = made[key]
