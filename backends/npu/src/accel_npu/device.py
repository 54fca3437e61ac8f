"""Device plugin `npu`: Ascend NPUs.

Core's base layer runs the device through `torch.npu`; this module adds the parts that are specific to the
vendor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from accel_core import hooks, implements
from accel_npu import machine
from accel_npu.config import NpuConfig

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from accel_core import Run, RunConfig, Unit, World

__all__ = ["NpuDevice", "environment_report", "vendor", "verify"]


def vendor() -> Any:
    """Return torch_npu's device module; importing torch_npu registers the device type `npu` with torch."""
    import torch_npu

    return torch_npu.npu


def verify() -> str | None:
    """Return the reason why torch cannot compute on an NPU here; None if it can."""
    if vendor().is_available():
        return None
    return "torch_npu loads but finds no usable NPU; npu-smi info says whether the driver works"


class NpuDevice:
    """Device `npu`."""

    below: Any

    def __init__(self, config: NpuConfig | None, run: Run) -> None:
        self.config = config or NpuConfig()
        self.run = run
        self.npu = vendor()

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        device: torch.device = self.below.select_device(world)
        if self.config.jit_compile is not None:
            self.npu.set_compile_mode(jit_compile=self.config.jit_compile)
        if self.config.allow_hf32 is not None:
            self.npu.matmul.allow_hf32 = self.npu.conv.allow_hf32 = self.config.allow_hf32
        return device

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        option, variable = self.config.cpu_affinity, os.environ.get(machine.AFFINITY)
        if option in (None, variable):
            return ()
        reason = (
            f"npu.cpu_affinity is {option!r}, but torch_npu reads {machine.AFFINITY}={variable!r}\n"
            "unset the variable, or leave the option out"
        )
        return [reason]

    @implements(hooks.capabilities)
    def capabilities(self, device: torch.device) -> frozenset[str]:
        capabilities: frozenset[str] = self.below.capabilities(device)
        return capabilities if self.npu.is_bf16_supported() else capabilities - {"bf16"}

    @implements(hooks.grad_scaler)
    def grad_scaler(self, unit: Unit) -> GradScaler | None:
        scaler: GradScaler | None = self.below.grad_scaler(unit)
        return (
            _saturating(self.npu)(**self.run.config.grad_scaler.to_kwargs()) if self._saturates() else scaler
        )

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        if not (self._saturates() and optimizers):
            return ()
        if isinstance(unit.hooks.grad_scaler(unit), self.npu.amp.GradScaler):
            return ()
        reason = (
            "fp16: overflow saturates on this NPU, and only torch_npu's loss scaler detects it; strategy"
            f" {unit.strategy!r} has its own loss scaler\nuse mixed_precision bf16 or 'no', or strategy ddp"
        )
        return [reason]

    def _saturates(self) -> bool:
        return self.run.config.mixed_precision == "fp16" and not self.npu.utils.is_support_inf_nan()


def _saturating(npu: Any) -> Any:
    """Return torch_npu's loss scaler class, which reads overflow from a status flag of the chip.

    Gradients stay finite on chips whose overflow saturates, so torch's scaler would never see an overflow.
    """

    class Scaler(npu.amp.GradScaler):  # type: ignore[misc]
        """A scaler that also loads the state of torch's scaler, which has no `dynamic`."""

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({"dynamic": True, **state})

    return Scaler


def environment_report() -> Mapping[str, str]:
    """Return lines for `accel env`."""
    npu = vendor()
    report = {
        "torch_npu": metadata.version("torch_npu"),
        "CANN": npu.utils.get_cann_version(),
        machine.VISIBLE: os.environ.get(machine.VISIBLE, "unset"),
    }
    for index in range(npu.device_count()):
        report[f"NPU {index}"] = npu.get_device_name(index)
    return report
