"""The hooks that libraries look for on the modules of a dispatched model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from accel_compat.big_models.aligning import AlignDevicesHook
from accel_compat.big_models.hooks import outside_graphs
from accel_compat.big_models.offload_folder import OffloadedWeightsLoader, PrefixedDataset
from accel_compat.modeling.sizes import check_device_same, named_module_tensors
from accel_compat.state.operations import find_device, send_to_device


class DispatchedHook(AlignDevicesHook):
    """An AlignDevicesHook of a module whose weights accel-big-models moves.

    The module's forward does not call it. Libraries call it by hand where they use weights outside of a
    forward, and make another from its class's name and attributes: that one has the mechanics of its class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._map = self.weights_map
        self._away: dict[str, torch.Tensor] = {}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place a module that takes the place of the one the hook was made for."""
        if getattr(module, "_hf_hook", None) is not self:
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not tensor.is_meta:
                        self._place(module, name)
        return module

    @outside_graphs
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Bring weights that are not on the device, and the inputs."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        device: Any = self.execution_device
        for name, tensor in named_module_tensors(module) if self.offload else ():
            if tensor.numel() and check_device_same(tensor.device, torch.device(device)):
                continue
            assert self.weights_map is not None
            self._away[name] = tensor.data
            tensor.data = self.weights_map[name].to(device, tensor.dtype)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    @outside_graphs
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Take away what `pre_forward` brought, and keep what a library changed in it."""
        tensors = dict(named_module_tensors(module))
        for name, away in self._away.items():
            if self.weights_map is not self._map and self.weights_map is not None:
                away.copy_(self.weights_map[name])  # a library merged something into the weight
            tensors[name].data = away
        self._away = {}
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Leave the weights to accel-big-models."""
        return module


# Libraries make a hook again by `getattr(accelerate.hooks, type(hook).__name__)`.
DispatchedHook.__name__ = AlignDevicesHook.__name__


def attach_dispatched_hooks(
    model: nn.Module,
    computed: Mapping[str, Any],
    offloaded: Collection[str],
    index: Mapping[str, Any],
    folder: Any,
    options: dict[str, Any],
) -> None:
    """Attach the hooks that libraries look for.

    The model gets one, and each module with tensors of its own.

    computed: name of each tensor -> device. offloaded: names of the tensors that come and go, or are views
    of files. index: name -> place in a file, of a folder. options: of each hook.
    """
    held = {
        name: tensor.detach()
        for name, tensor in all_tensors(model)
        if name in offloaded and name not in index
    }
    dataset = OffloadedWeightsLoader(state_dict=held, save_folder=folder, index=dict(index))
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        own = {name: f"{start}{name}" for name, _ in named_module_tensors(module)}
        if not own and prefix:
            continue
        offload = any(name in offloaded for name in own.values())
        hook = DispatchedHook(
            execution_device=next(
                (computed[name] for name in own.values()), next(iter(computed.values()), None)
            ),
            offload=offload,
            io_same_device=not prefix,
            weights_map=PrefixedDataset(dataset, start) if offload else None,
            tied_params_map={},
            **options,
        )
        if offload:
            hook.original_devices = {
                name: torch.device("meta" if whole in index else "cpu") for name, whole in own.items()
            }
        module._hf_hook = hook


def all_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers by all of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]
