"""Weights of an offloaded module, for a while on a device or in a state dict."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from accel_compat.big_models.aligning import AlignDevicesHook
from accel_compat.big_models.hooks import SequentialHook
from accel_compat.big_models.offload_folder import load_offloaded_weight
from accel_compat.modeling.loading import set_module_tensor_to_device
from accel_compat.modeling.sizes import find_place

_LOGGER: Final = logging.getLogger("accelerate.utils.modeling")


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Find the hook that offloads a module's tensors, also among several."""
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    return next((each for each in hooks if isinstance(each, AlignDevicesHook) and each.offload), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Tell whether a hook offloads the module's tensors."""
    return offloading_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: torch.device | None = None) -> Iterator[None]:
    """Bring a module's own parameters to a device in a context.

    execution_device: default for an offloaded module: where it runs; for others: where they are.
    """
    hook = offloading_hook(module)
    if hook is not None:
        before = hook.execution_device
        hook.execution_device = before if execution_device is None else execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = before
    elif execution_device is not None:
        devices = {name: tensor.device for name, tensor in module.named_parameters(recurse=False)}
        try:
            for name in devices:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, device in devices.items():
                set_module_tensor_to_device(module, name, device)
    else:
        yield


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict on the CPU; offloaded modules come there one by one."""
    state: dict[str, torch.Tensor] = {}
    missing: dict[str, None] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        try:
            with align_module_device(module, torch.device("cpu") if has_offloaded_params(module) else None):
                for key, tensor in module.state_dict(prefix=prefix).items():
                    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
                        state[key] = tensor.to("cpu") if isinstance(tensor, torch.Tensor) else tensor
                    else:
                        missing[key] = None
        except MemoryError:
            raise MemoryError("Offloaded module must fit in CPU memory to call save_model!") from None
    left = [key for key in missing if key not in state]
    if left:
        _LOGGER.warning(
            "The following tensors were not saved because they were still on meta device: %s", left
        )
    return state


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, str | torch.Tensor],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, str | torch.Tensor]:
    """Put tensors of the module that holds `module_name` into a state dict.

    Only entries that the state dict has are replaced. Tensors of an offloaded module come from the device
    `device_to_put_offload`.
    """
    root = module_name[: module_name.rfind(".")]
    device: Any = device_to_put_offload if has_offloaded_params(module) else None
    with align_module_device(module, device):
        for key, tensor in module.state_dict().items():
            if f"{root}.{key}" in state_dict:
                state_dict[f"{root}.{key}"] = tensor
    return state_dict


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str) -> None:
    """Put the tensors of an offload folder into the model, on the CPU."""
    for name, info in (index or {}).items():
        if "SCB" not in name:
            scales = name.replace("weight", "SCB")
            statistics: Any = None
            if index is not None and "weight" in name and scales in index:
                statistics = load_offloaded_weight(
                    os.path.join(offload_folder, f"{scales}.dat"), index[scales]
                )
            value = load_offloaded_weight(os.path.join(offload_folder, f"{name}.dat"), info)
            set_module_tensor_to_device(model, name, "cpu", value, fp16_statistics=statistics)


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Warn of tied weights that a map puts on several devices."""
    for group in tied_params:
        devices = {name: find_place(name, device_map) for name in group}
        if missing := [name for name, device in devices.items() if device is None]:
            raise ValueError(f"The `device_map` does not contain the module {missing[0]}.")
        if len(set(devices.values())) > 1:
            _LOGGER.warning(
                "Tied parameters are on different devices: %s. Please modify your custom device map or set"
                " `device_map='auto'`. ",
                devices,
            )
