"""Whole modules that stay on the CPU between their uses.

Of a pipeline's modules, one is on the device at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_compat.big_models.hooks import (
    ModelHook,
    add_hook_to_module,
    outside_graphs,
    remove_hook_from_module,
)
from accel_compat.state.memory import clear_device_cache
from accel_compat.state.operations import send_to_device
from accel_compat.state.states import PartialState


class CpuOffload(ModelHook):
    """Hook that brings a module to a device for its forward, and leaves it there.

    `init_hook` moves the module to the CPU.

    prev_module_hook: of the module that moves to the CPU before this one's forward.
    """

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = (
            PartialState().default_device if execution_device is None else execution_device
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module to the CPU."""
        return module.to("cpu")

    @outside_graphs
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Move the previous module to the CPU, and this one and its inputs to the device."""
        before = self.prev_module_hook
        if isinstance(before, UserCpuOffloadHook) and _device(before.model) != torch.device("cpu"):
            before.offload()
            clear_device_cache()
        device = self.execution_device
        if _device(module) != device:
            module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """A module and its hook.

    `offload` moves the module to the CPU. `remove` detaches the hook.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the module to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Detach the hook; the module stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a module on the CPU until its forward, and then on the device.

    The returned hook's `offload` moves the module back.

    prev_module_hook: of the module of a pipeline that moves to the CPU when this one runs.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
