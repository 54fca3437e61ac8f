"""Norm and clipping of gradients that lie on several meshes, which torch's own clipping cannot put together.

Each rank looks at its own parts only. What they give is reduced once over each dimension that some
gradient is split over, for all gradients together: a number each, however many parameters there are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Layout", "clip_norm", "clip_value"]


@frozen(eq=False)
class Layout:
    """Where the gradients of some parameters lie. The same on all ranks that hold parts of them.

    kinds: for each parameter, which set of `splits` it belongs to; -1: others count it. splits: the
    groups that its parts are spread over. stages: the group of those that hold other parameters of the model.
    """

    parameters: tuple[nn.Parameter, ...]
    kinds: tuple[int, ...]
    splits: tuple[tuple[dist.ProcessGroup, ...], ...]
    stages: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls,
        parameters: Sequence[nn.Parameter],
        stages: dist.ProcessGroup | None = None,
        elsewhere: Collection[nn.Parameter] = (),
    ) -> Layout:
        """Look at each parameter once; parameters do not move afterwards. elsewhere: others count them."""
        found: dict[tuple[dist.ProcessGroup, ...], int] = {}
        kinds = tuple(
            [-1 if p in elsewhere else found.setdefault(_groups(p), len(found)) for p in parameters]
        )
        return cls(tuple(parameters), kinds, tuple(found), stages)

    def is_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether it is that of these parameters."""
        return len(parameters) == len(self.parameters) and all(
            mine is theirs for mine, theirs in zip(self.parameters, parameters, strict=True)
        )


def _groups(parameter: nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
    tensor: Any = parameter
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(dim) for dim in split if mesh.size(dim) > 1)


@torch.no_grad()
def clip_norm(layout: Layout, max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Scale the gradients so that their total norm is `max_norm` at most; gives the norm before. Collective.

    As `torch.nn.utils.clip_grad_norm_` computes it of the whole gradients, in float32.
    """
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
    parts = torch.zeros(max(len(layout.splits), 1), device=device)
    norms = _norms([gradient for gradient, _ in here], norm_type, device)
    for kind in range(len(layout.splits)):
        mine = [norm for norm, (_, of) in zip(norms, here, strict=True) if of == kind]
        if mine:
            stacked = torch.stack(mine)
            parts[kind] = stacked.max() if extreme else (stacked**norm_type).sum()
    for group in dict.fromkeys(group for groups in layout.splits for group in groups):
        split = [kind for kind, groups in enumerate(layout.splits) if group in groups]
        reduced = parts[split]
        dist.all_reduce(reduced, operation, group=group)
        parts[split] = reduced
    total = parts.max() if extreme else parts.sum()
    if layout.stages is not None:
        dist.all_reduce(total, operation, group=layout.stages)
    return total if extreme else total ** (1.0 / norm_type)


def _norms(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> list[Tensor]:
    # torch has no maximum of nothing, and an uneven shard may be empty.
    found: dict[int, Tensor] = {}
    full = [gradient for gradient in gradients if gradient.numel()]
    for same in _by_device(full).values():
        of = torch._foreach_norm(same, norm_type, dtype=torch.float32)
        found |= {id(gradient): norm.to(device) for gradient, norm in zip(same, of, strict=True)}
    nothing = torch.zeros((), device=device)
    return [found.get(id(gradient), nothing) for gradient in gradients]


def _local(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found
