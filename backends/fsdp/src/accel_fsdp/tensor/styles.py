"""Styles of transformers' plans that torch has no class for.

A module that is written for plain tensors computes with this rank's parts of its parameters. An input that is
the same on all ranks then gets a part of its gradient on each rank, and these parts are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    Change = Callable[[Tensor, DeviceMesh], Tensor]

__all__ = ["Cut", "Local", "add_up", "divide", "sum_gradient", "sum_gradient_of_last"]


class Cut(ParallelStyle):
    """Splits parameters of a module, and leaves its forward as it is.

    placements: key of a parameter -> how it is laid out.
    """

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        super().__init__()
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for key, placement in self.placements.items():
            whole = module._parameters.get(key)
            if whole is not None:
                part = distribute_tensor(whole.detach(), device_mesh, [placement], src_data_rank=None)
                module._parameters[key] = nn.Parameter(part, requires_grad=whole.requires_grad)
        return module


class Local(Cut):
    """Runs the module's forward on this rank's parts of its own parameters.

    inputs, outputs: change of each floating-point tensor that goes into the module, or comes out.
    """

    def __init__(
        self,
        placements: Mapping[str, Placement] | None = None,
        *,
        inputs: Change | None = None,
        outputs: Change | None = None,
    ) -> None:
        super().__init__(placements or {})
        self.inputs, self.outputs = inputs, outputs
        self._split: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(partial(self._enter, device_mesh), with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)
        module.register_forward_hook(lambda module, inputs, out: _each(self.outputs, out, device_mesh))
        return module

    def _enter(self, mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> Any:
        parameters: dict[str, Any] = module._parameters
        own = {key: each for key, each in parameters.items() if isinstance(each, DTensor)}
        self._split[module] = own
        parameters.update({key: each.to_local() for key, each in own.items()})
        return _each(self.inputs, (args, kwargs), mesh)

    def _leave(self, module: nn.Module, *call: Any) -> None:
        module._parameters.update(self._split.pop(module, {}))


def _each(change: Change | None, values: Any, mesh: DeviceMesh) -> Any:
    def changed(tensor: Tensor) -> Tensor:
        return change(tensor, mesh) if change and tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, changed, values)


def sum_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the same tensor, whose gradients of all ranks are added up in backward."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def sum_gradient_of_last(width: int, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the same tensor; gradients of its last `width` columns are added up in backward."""
    first, last = tensor.split([tensor.shape[-1] - width, width], dim=-1)
    return torch.cat([first, sum_gradient(last, mesh)], dim=-1)


def add_up(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of all ranks' tensors."""
    part = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    return part.redistribute(placements=[Replicate()]).to_local()


def divide(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's share of a tensor that is the same on all ranks and is summed later."""
    return tensor / mesh.size()
