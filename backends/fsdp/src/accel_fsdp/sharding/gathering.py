"""Whole tensors out of parts: the tensors of a block travel together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["whole", "whole_by_block"]

_gather: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # torch 2.12 and earlier
_ALIGNED = 16
"""Each part begins at a multiple of these bytes, so that its dtype can view it."""


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, apart from its storage. Collective."""
    data: Any = tensor.detach()
    if not isinstance(data, DTensor):
        return tensor.detach().clone()
    found: Tensor = data.full_tensor()
    return found.clone() if found.is_set_to(data.to_local()) else found


def whole_by_block(models: Sequence[nn.Module], tensors: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor), with one collective per block and mesh. Collective.

    Names of one block follow one another. Tensors that two dimensions of a mesh split travel alone.
    """
    homes: dict[Any, int] = {}
    modules = [each for model in models for each in model.modules() if isinstance(each, FSDPModule)]
    for number, module in enumerate(reversed(modules)):  # inner blocks before the model around them
        for parameter in module.parameters():
            homes.setdefault(parameter, number)
    batches: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        split = _split_of(tensor)
        where = name if split is None else (homes.get(tensor), tensor.device_mesh, split)
        batches.setdefault(where, {})[name] = tensor
    for where, batch in batches.items():
        if isinstance(where, str):
            yield from ((name, whole(tensor)) for name, tensor in batch.items())
        else:
            yield from zip(batch, _gathered([*batch.values()], where[2]), strict=True)


def _split_of(tensor: Tensor) -> int | None:
    """Return the one dimension of its mesh that splits the tensor evenly in order; None: it travels alone."""
    if not isinstance(tensor, DTensor):
        return None
    split = [dim for dim, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if len(split) != 1 or type(tensor.placements[split[0]]) is not Shard:
        return None
    wraps = is_traceable_wrapper_subclass(tensor.to_local())
    return None if wraps or tensor.device_mesh.size(split[0]) == 1 else split[0]


@torch.no_grad()
def _gathered(tensors: Sequence[Any], split: int) -> Iterator[Tensor]:
    """Yield these tensors whole, which the dimension `split` of one mesh has cut as `torch.chunk` does."""
    mesh, locals_ = tensors[0].device_mesh, [tensor.to_local().contiguous() for tensor in tensors]
    ranks, dims = mesh.size(split), [tensor.placements[split].dim for tensor in tensors]
    chunks = [-(-tensor.shape[dim] // ranks) for tensor, dim in zip(tensors, dims, strict=True)]
    sizes = [
        tensor.numel() // max(tensor.shape[dim], 1) * chunk * tensor.element_size()
        for tensor, dim, chunk in zip(tensors, dims, chunks, strict=True)
    ]
    begins = [*accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)]
    sent = torch.empty(begins[-1], dtype=torch.uint8, device=locals_[0].device)
    for begin, local in zip(begins, locals_, strict=False):
        sent[begin : begin + local.nbytes] = local.view(-1).view(torch.uint8)
    received = sent.new_empty(ranks * begins[-1])
    _gather(received, sent, group=mesh.get_group(split))
    rows = received.view(ranks, begins[-1])
    for tensor, dim, chunk, begin in zip(tensors, dims, chunks, begins, strict=False):
        parts, shape = [], [*tensor.shape]
        for rank in range(ranks):
            shape[dim] = max(min(chunk, tensor.shape[dim] - rank * chunk), 0)
            size = torch.Size(shape).numel() * tensor.element_size()
            parts.append(rows[rank, begin : begin + size].view(tensor.dtype).view(shape))
        yield torch.cat(parts, dim)
