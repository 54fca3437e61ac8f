"""Whole parameters beside sharded ones, such as adapters that were added to a sharded model.

torch's `fully_shard` does not know them. Each rank has all of them, and their gradients are averaged when a
backward ends, as gradients of sharded parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from accel_fsdp.sharding.accumulated import param_groups
from accel_fsdp.sharding.meta import send_weights

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Replicas", "local_of", "send_replicas"]


class Replicas:
    """Parameters of which each rank of a mesh has a copy."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], mesh: DeviceMesh, gives_zeros: Callable[[], bool]
    ) -> None:
        """Average the gradients of these parameters over the ranks of the mesh, after each backward.

        gives_zeros: called in each backward; True if parameters that this rank did not use get a gradient.
        """
        self.parameters = parameters
        self.syncs = True
        """False while gradients stay as they are, inside a window."""
        self._gives_zeros = gives_zeros
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        self._ranks = mesh.size()
        self._last_backward = -1
        """The backward that will average, by torch's number of it: one that failed has not."""
        for parameter in parameters:
            trains = parameter.requires_grad
            parameter.requires_grad_().register_post_accumulate_grad_hook(self._queue)
            parameter.requires_grad_(trains)  # it may be unfrozen later

    def _queue(self, parameter: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if self.syncs and backward != self._last_backward:
            self._last_backward = backward
            Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        """Average the gradients, in one buffer per dtype. Collective over the mesh."""
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
            alike = [parameter for parameter in trained if parameter.dtype == dtype]
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
            local = [local_of(part) for part in parts]
            sums = torch.cat([part.reshape(-1) for part in local]).div_(self._ranks)
            for group in self._groups:
                dist.all_reduce(sums, group=group)
            for part, mean in zip(local, sums.split([part.numel() for part in local]), strict=True):
                part.copy_(mean.view_as(part))
            for parameter, part in zip(alike, parts, strict=True):
                if parameter.grad is None and self._gives_zeros():
                    parameter.grad = part


def local_of(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, or a tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def send_replicas(model: nn.Module) -> None:
    """Give the replicas of a model (HSDP) the first one's shards. Collective.

    A program may have drawn other first weights on each rank.
    """
    for group in param_groups(model.modules()):
        if hasattr(group.mesh_info, "replicate_process_group"):
            held = [
                one._module_info.module._parameters[one._module_info.param_name] for one in group.fsdp_params
            ]
            send_weights(
                [local_of(parameter) for parameter in held], [group.mesh_info.replicate_process_group]
            )
