"""Norm and clipping of gradients on several meshes, which torch cannot combine.

Each rank looks at its own parts only. Their results are reduced once over each dimension that some
gradient is split over, for all gradients together: a number each, however many parameters there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.tensor import DTensor

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Layout", "clip_norm", "clip_value", "is_double"]


@frozen(eq=False)
class Layout:
    """Places of the gradients of some parameters, alike on all ranks with parts.

    kinds: for each parameter, which set of `splits` it belongs to; -1: others count it. splits: the
    groups that its parts are spread over. is_double: one is float64. stages: the group of the ranks that hold
    other parameters of the model.
    """

    parameters: tuple[nn.Parameter, ...]
    kinds: tuple[int, ...]
    splits: tuple[tuple[dist.ProcessGroup, ...], ...]
    is_double: bool
    stages: dist.ProcessGroup | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of norms."""
        return torch.float64 if self.is_double else torch.float32

    @classmethod
    def of(
        cls,
        parameters: Sequence[nn.Parameter],
        stages: dist.ProcessGroup | None = None,
        elsewhere: Collection[nn.Parameter] = (),
    ) -> Layout:
        """Look at each parameter once.

        Parameters do not move afterwards. elsewhere: others count them.
        """
        found: dict[tuple[dist.ProcessGroup, ...], int] = {}
        kinds = tuple(
            [-1 if p in elsewhere else found.setdefault(_groups(p), len(found)) for p in parameters]
        )
        return cls(tuple(parameters), kinds, tuple(found), is_double(parameters), stages)

    def is_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return True if this is the layout of these parameters."""
        return len(parameters) == len(self.parameters) and all(
            mine is theirs for mine, theirs in zip(self.parameters, parameters, strict=True)
        )


def is_double(parameters: Iterable[nn.Parameter]) -> bool:
    """Return True if any parameter is float64.

    Alike on all ranks that name the same parameters.
    """
    return any(parameter.dtype == torch.float64 for parameter in parameters)


def _groups(parameter: nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
    tensor: Any = parameter
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(dim) for dim in split if mesh.size(dim) > 1)


@torch.no_grad()
def clip_norm(layout: Layout, max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Scale the gradients so that their total norm is `max_norm` at most.

    Gives the norm before. Collective.

    As `torch.nn.utils.clip_grad_norm_` computes it of the whole gradients, in float32; in float64, if a
    parameter is of it.

    Raises:
        AccelError: `norm_type` is not above 0. Parts of a gradient do not add up to such a number.
    """
    if not norm_type > 0:  # nan too
        raise AccelError(
            f"clip_grad_norm_: norm_type is {norm_type}, which cannot be computed of gradients in parts\n"
            "give 2, any other p above 0, or inf"
        )
    pairs = [(_local(p.grad), kind) for p, kind in zip(layout.parameters, layout.kinds, strict=True)]
    here = [(gradient, kind) for gradient, kind in pairs if gradient is not None]
    total = _total(layout, here, norm_type, device)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for where, gradients in _by_device([gradient for gradient, _ in here]).items():
        torch._foreach_mul_(gradients, scale.to(where))
    return total


@torch.no_grad()
def clip_value(parameters: Sequence[nn.Parameter], value: float) -> None:
    """Clamp each gradient to [-value, value]."""
    here = [gradient for p in parameters if (gradient := _local(p.grad)) is not None]
    for gradients in _by_device(here).values():
        torch._foreach_clamp_min_(gradients, -value)
        torch._foreach_clamp_max_(gradients, value)


def _total(
    layout: Layout, here: Sequence[tuple[Tensor, int]], norm_type: float, device: torch.device
) -> Tensor:
    extreme = norm_type == float("inf")
    operation = dist.ReduceOp.MAX if extreme else dist.ReduceOp.SUM
    nothing = torch.zeros((), device=device, dtype=layout.dtype)
    parts = [nothing] * max(len(layout.splits), 1)
    norms = _norms([gradient for gradient, _ in here], norm_type, nothing)
    for kind in range(len(layout.splits)):
        mine = [norm for norm, (_, of) in zip(norms, here, strict=True) if of == kind]
        if mine:
            stacked = torch.stack(mine)
            parts[kind] = stacked.max() if extreme else (stacked**norm_type).sum()
    for group in dict.fromkeys(group for groups in layout.splits for group in groups):
        # One by one and put together again: to index by a list would wait for the device.
        split = [kind for kind, groups in enumerate(layout.splits) if group in groups]
        reduced = torch.stack([parts[kind] for kind in split])
        dist.all_reduce(reduced, operation, group=group)
        for kind, part in zip(split, reduced.unbind(), strict=True):
            parts[kind] = part
    every = torch.stack(parts)
    total = every.max() if extreme else every.sum()
    if layout.stages is not None:
        dist.all_reduce(total, operation, group=layout.stages)
    return total if extreme else total ** (1.0 / norm_type)


def _norms(gradients: Sequence[Tensor], norm_type: float, nothing: Tensor) -> list[Tensor]:
    """Return the norm of each, on the device and of the dtype of `nothing`."""
    # torch has no maximum of nothing, and an uneven shard may be empty.
    found: dict[int, Tensor] = {}
    full = [gradient for gradient in gradients if gradient.numel()]
    for same in _by_device(full).values():
        # All of a device at once: norms of offloaded gradients would be copied one by one.
        of = torch.stack(torch._foreach_norm(same, norm_type, dtype=nothing.dtype)).to(nothing.device)
        found |= {id(gradient): norm for gradient, norm in zip(same, of.unbind(), strict=True)}
    return [found.get(id(gradient), nothing) for gradient in gradients]


def _local(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found
