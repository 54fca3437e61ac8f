"""Groups of the user's optimizer, split by the plugin's conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core import Unit
    from accel_megatron.config import Sized

__all__ = ["by_conditions"]


def by_conditions(config: Sized, unit: Unit) -> None:
    """Move parameters under `no_wd_decay_cond` or `scale_lr_cond` to own groups."""
    if config.no_wd_decay_cond is None and config.scale_lr_cond is None:
        return
    names = {parameter: name for name, parameter in unit.named_parameters().items()}
    for optimizer in unit.optimizers:
        split: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            kinds: dict[tuple[bool, bool], list[Any]] = {}
            for parameter in group["params"]:
                kinds.setdefault(_kind(config, names[parameter], parameter), []).append(parameter)
            for (free, scaled), parameters in kinds.items():
                made = {**group, "params": parameters}
                made |= {"weight_decay": 0.0} if free else {}
                made |= {"lr": group["lr"] * config.lr_mult} if scaled else {}
                split.append(made)
        optimizer.param_groups[:] = split


def _kind(config: Sized, name: str, parameter: Any) -> tuple[bool, bool]:
    free, scaled = config.no_wd_decay_cond, config.scale_lr_cond
    return bool(free and free(name, parameter)), bool(scaled and scaled(name, parameter))
