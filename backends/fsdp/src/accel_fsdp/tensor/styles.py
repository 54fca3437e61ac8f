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

__all__ = ["Cut", "Local", "MlaLatent", "Whole"]


class Whole(ParallelStyle):
    """Leaves a module or parameter whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


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
                part = distribute_tensor(
                    whole.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank
                )
                module._parameters[key] = nn.Parameter(part, requires_grad=whole.requires_grad)
        return module


class Local(Cut):
    """Runs the module's forward on this rank's parts of its own parameters.

    takes_whole: its inputs are the same on all ranks; their gradients are summed.
    sums: what it returns is a part of a sum over the ranks.
    divides: its inputs are divided by the number of ranks, for a later sum of what is the same on all.
    """

    def __init__(
        self,
        placements: Mapping[str, Placement] | None = None,
        *,
        takes_whole: bool = False,
        sums: bool = False,
        divides: bool = False,
    ) -> None:
        super().__init__(placements or {})
        self.takes_whole, self.sums, self.divides = takes_whole, sums, divides
        self._split: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(partial(self._enter, device_mesh), with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)
        if self.sums:
            module.register_forward_hook(lambda module, inputs, outputs: _each(_sum, outputs, device_mesh))
        return module

    def _enter(self, mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> Any:
        parameters: dict[str, Any] = module._parameters
        own = {key: each for key, each in parameters.items() if isinstance(each, DTensor)}
        self._split[module] = own
        parameters.update({key: each.to_local() for key, each in own.items()})
        if self.takes_whole:
            args, kwargs = _each(sum_gradient, (args, kwargs), mesh)
        if self.divides:
            args, kwargs = _each(lambda tensor, mesh: tensor / mesh.size(), (args, kwargs), mesh)
        return args, kwargs

    def _leave(self, module: nn.Module, *call: Any) -> None:
        module._parameters.update(self._split.pop(module, {}))


class MlaLatent(ParallelStyle):
    """A whole Linear whose output is a latent vector and a key: multi-head latent attention.

    Split layers take the latent, and sum its gradients. The key meets this rank's heads only.

    width: of the key.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def complete(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            latent, key = output.split([output.shape[-1] - self.width, self.width], dim=-1)
            return torch.cat([latent, sum_gradient(key, device_mesh)], dim=-1)

        module.register_forward_hook(complete)
        return module


def _each(function: Callable[[Tensor, DeviceMesh], Tensor], values: Any, mesh: DeviceMesh) -> Any:
    def real(tensor: Tensor) -> Tensor:
        return function(tensor, mesh) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, real, values)


def sum_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the same tensor, whose gradients of all ranks are added up in backward."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _sum(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    part = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    return part.redistribute(placements=[Replicate()]).to_local()
