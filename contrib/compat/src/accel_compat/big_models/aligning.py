"""Hooks that bring a module's weights and inputs to one device.

They offload the weights after the forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import define, field
from torch import nn

from accel_compat.big_models.hooks import ModelHook, add_hook_to_module, outside_graphs
from accel_compat.big_models.offload_folder import PrefixedDataset
from accel_compat.modeling.loading import set_module_tensor_to_device
from accel_compat.modeling.sizes import get_non_persistent_buffers, named_module_tensors
from accel_compat.modeling.wrappers import recursive_getattr
from accel_compat.state.operations import find_device, send_to_device


@define(eq=False, slots=False)
class AlignDevicesHook(ModelHook):
    """Bring weights and inputs to `execution_device` before the forward.

    offload: weights are on the meta device except in the forward, which takes them from `weights_map`.
    io_same_device: outputs go back to the device of the first input.
    weights_map: name of a tensor in the module -> its value. Default: what the module holds, on the CPU.
    offload_buffers: offload persistent buffers too.
    place_submodules: weights of the modules below it too.
    skip_keys: keyword arguments and outputs that stay where they are.
    tied_params_map: address of a tied weight -> its copies by device, made once.
    """

    execution_device: Any = field(default=None, repr=str)
    offload: bool = False
    io_same_device: bool = False
    weights_map: Mapping[str, torch.Tensor] | None = field(default=None, repr=False)
    offload_buffers: bool = False
    place_submodules: bool = False
    skip_keys: str | list[str] | None = None
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = field(default=None, repr=False)
    input_device: torch.device | None = field(default=None, init=False, repr=False)
    param_original_devices: dict[str, torch.device] = field(factory=dict, init=False, repr=False)
    buffer_original_devices: dict[str, torch.device] = field(factory=dict, init=False, repr=False)
    tied_params_names: set[str] = field(factory=set, init=False, repr=False)
    tied_pointers_to_remove: set[tuple[int, Any]] = field(factory=set, init=False, repr=False)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the weights, or offload them."""
        if self.execution_device in ("meta", torch.device("meta")):
            self.tied_params_map = None  # every address there is 0
        if self.offload:
            self._offload(module)
        elif self.execution_device is not None:
            for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                self._place(module, name)
        return module

    def _place(self, module: nn.Module, name: str, value: torch.Tensor | None = None) -> None:
        statistics: Any = None
        if value is not None and value.dtype == torch.int8 and "weight" in name:
            # Some quantized weights have their scales beside them.
            statistics = (self.weights_map or {}).get(name.replace("weight", "SCB"))
        device: Any = self.execution_device
        set_module_tensor_to_device(
            module, name, device, value, fp16_statistics=statistics, tied_params_map=self.tied_params_map
        )

    def _offload(self, module: nn.Module) -> None:
        recurse = self.place_submodules
        self.original_devices = {
            name: tensor.device for name, tensor in named_module_tensors(module, recurse=recurse)
        }
        if self.weights_map is None:
            tensors = named_module_tensors(module, self.offload_buffers, recurse)
            self.weights_map = {name: tensor.to("cpu") for name, tensor in tensors}
        for name in self._offloaded(module):
            if self.tied_params_map and recursive_getattr(module, name).data_ptr() in self.tied_params_map:
                self.tied_params_names.add(name)
            set_module_tensor_to_device(module, name, "meta")
        if self.execution_device is None:
            return
        buffers = [name for name, _ in module.named_buffers(recurse=recurse)]
        kept = get_non_persistent_buffers(module, recurse) if self.offload_buffers else buffers
        for name in kept:
            self._place(module, name)

    def _offloaded(self, module: nn.Module) -> list[str]:
        tensors = named_module_tensors(module, self.offload_buffers, self.place_submodules, True)
        return [name for name, _ in tensors]

    @outside_graphs
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Bring offloaded weights and the inputs to the device."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self._bring(module)
        device = self.execution_device
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _bring(self, module: nn.Module) -> None:
        self.tied_pointers_to_remove = set()
        weights, copies = self.weights_map, self.tied_params_map
        assert weights is not None
        for name in self._offloaded(module):
            value = weights[name]
            if copies is not None and value is not None:
                address = value.data_ptr()
                if name in self.tied_params_names:
                    copies.setdefault(address, {})
                if address in copies and self.execution_device not in copies[address]:
                    self.tied_pointers_to_remove.add((address, self.execution_device))
            self._place(module, name, value)

    @outside_graphs
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Offload the weights again, and bring the output to the inputs' device."""
        if self.offload:
            for name in self._offloaded(module):
                set_module_tensor_to_device(module, name, "meta")
            for address, device in self.tied_pointers_to_remove:
                (self.tied_params_map or {}).get(address, {}).pop(device, None)
            self.tied_pointers_to_remove = set()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Bring offloaded weights back to the devices they came from."""
        if self.offload:
            weights: Mapping[str, torch.Tensor] = self.weights_map or {}
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    set_module_tensor_to_device(module, name, device, weights.get(name))
        return module


def attach_align_device_hook(
    module: nn.Module,
    execution_device: torch.device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: dict[int, dict[torch.device, torch.Tensor]] | None = None,
) -> None:
    """Attach an AlignDevicesHook to each module that has tensors of its own.

    preload_module_classes: names of classes whose modules bring the weights of all modules below them.
    """
    whole = offload and type(module).__name__ in (preload_module_classes or ())
    prefix = f"{module_name}." if module_name else ""
    if whole or any(True for _ in named_module_tensors(module)):
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    for name, child in () if whole else module.named_children():
        placing = (execution_device, offload, weights_map, offload_buffers, f"{prefix}{name}")
        attach_align_device_hook(child, *placing, skip_keys, preload_module_classes, tied_params_map)
