"""Device plugin `hpu`: Gaudi HPUs.

Core's base layer runs the device through `torch.hpu`; this module adds the parts that are specific to the
vendor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from accel_core import hooks, implements
from accel_hpu import machine
from accel_hpu.buckets import padded
from accel_hpu.config import HpuConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_core import Run, RunConfig, Unit

__all__ = ["HpuDevice", "environment_report", "vendor", "verify"]

FIRST_GENERATION: Final = "GAUDI"
_CUTS: Final = ("backward", "step")


def vendor(module: str) -> Any:
    """Import a module of Gaudi's software; the first import registers the device type `hpu` with torch."""
    return import_module(f"habana_frameworks.torch.{module}")


def verify() -> str | None:
    """Return the reason why torch cannot compute on an HPU here; None if it can."""
    if vendor("hpu").is_available():
        return None
    return "habana_frameworks loads but finds no usable HPU; hl-smi says whether the driver works"


class HpuDevice:
    """Device `hpu`."""

    below: Any

    def __init__(self, config: HpuConfig | None, run: Run) -> None:
        self.config = config or HpuConfig()
        self.run = run
        self._hpu = vendor("hpu")
        # Gaudi's software reads its variable when it is imported, and torch may have imported it before the
        # run. If the variable is unset, the mode depends on the release: lazy before 1.21, eager since.
        self._lazy: bool = vendor("utils.internal").is_lazy()
        self._cut = vendor("core").mark_step if self._lazy else None
        if run.world.size > 1:
            vendor("distributed.hccl")  # the import registers the backend with torch

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        if self.config.lazy not in (None, self._lazy):
            return [self._other_mode()]
        reasons = []
        if self.config.graphs and not self._lazy:
            reasons.append(
                "hpu.graphs replays graphs that lazy mode records, and this is eager mode; set hpu.lazy: true"
            )
        if self._lazy and (config.compile.backend or "no").lower() != "no":
            reasons.append("hpu: torch.compile does not work in lazy mode; set hpu.lazy: false")
        return reasons

    def _other_mode(self) -> str:
        value, wanted = os.environ.get(machine.LAZY), str(int(self.config.lazy or False))
        if value not in (None, wanted):
            return (
                f"hpu.lazy is {self.config.lazy}, but {machine.LAZY}={value!r}, which Gaudi's software"
                " reads\nunset the variable, or leave the option out"
            )
        return (
            f"hpu.lazy is {self.config.lazy}, but Gaudi's software was imported in the other mode before"
            " the run, as torch does by itself\n"
            f"start the script by accel launch, or with {machine.LAZY}={wanted}"
        )

    @implements(hooks.capabilities)
    def capabilities(self, device: torch.device) -> frozenset[str]:
        capabilities: frozenset[str] = self.below.capabilities(device)
        return capabilities - {"fp16"} if self._hpu.get_device_name() == FIRST_GENERATION else capabilities

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if self.config.graphs and phase == "post" and unit.optimizers:
            self._hpu.ModuleCacher()(model=model, allow_unused_input=True, inplace=True)
        return model

    @implements(hooks.place_batch)
    def place_batch(self, unit: Unit | None, batch: Any, device: torch.device) -> Any:
        return padded(batch, self.config.buckets, self.config.padding) if self.config.buckets else batch

    @implements(hooks.mark_step)
    def mark_step(self, point: str) -> None:
        # Reading a value on the host ends a graph by itself, and so does copying state. With buckets the
        # graph also ends before each batch, so that padding has its own graph. As a part of the model's
        # graph, padding would make a graph for each length of the data again.
        if self._cut is not None and (point in _CUTS or (point == "batch" and self.config.buckets)):
            self._cut()

    @implements(hooks.memory_stats)
    def memory_stats(self, device: torch.device) -> Mapping[str, int]:
        stats = self._hpu.memory_stats(device)
        allocated, total = stats["InUse"], stats["Limit"]
        return {
            "allocated": allocated,
            "peak": stats["MaxInUse"],
            "total": total,
            "free": total - allocated,
        }


def environment_report() -> Mapping[str, str]:
    """Return lines for `accel env`."""
    hpu = vendor("hpu")
    report = {name: os.environ.get(name, "unset") for name in (machine.VISIBLE, machine.LAZY)}
    return report | {"HPUs": f"{hpu.device_count()} x {hpu.get_device_name()}"}
