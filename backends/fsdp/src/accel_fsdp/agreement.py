"""Comparison of gradients of whole parameters on ranks that split layers.

A module that works on a rank's part of a sequence, or of heads, sees a part of the gradient. Unless the plan
says so, nothing sums these parts, and each rank trains weights of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from torch.distributed.tensor import DTensor

from accel_core import AccelError, before_step
from accel_fsdp.dims import replica_names

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_core import Unit

__all__ = ["compare_gradients"]

STEPS: Final = 2
"""Steps that begin with a comparison; some gradients are zero in the first."""
SAMPLE: Final = 2**16
"""Elements of a gradient that are compared, besides its norm."""
TOLERANCE: Final = 0.05
"""Part of its norm by which a gradient may differ: devices may sum in any order."""
NEGLIGIBLE: Final = 1e-3
"""Part of the norm of all gradients; less may be rounding errors alone."""


def compare_gradients(unit: Unit, optimizer: Optimizer) -> None:
    """Have ranks compare gradients of whole parameters in an optimizer's first steps.

    Such a step raises AccelError where ranks that split layers differ.
    """
    names = replica_names(unit.mesh) if unit.mesh is not None else []
    left, weak_unit = STEPS, ref(unit)

    def compare(optimizer: Optimizer, *arguments: Any) -> None:
        nonlocal left
        live = weak_unit()
        if left and live is not None:
            left -= 1
            for name in names:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                _compare(live, name, [p for p in parameters if p.requires_grad and not _is_split(p, name)])

    if names:
        before_step(optimizer, compare)


def _is_split(parameter: Tensor, name: str) -> bool:
    return isinstance(parameter, DTensor) and name in (parameter.device_mesh.mesh_dim_names or ())


def _compare(unit: Unit, name: str, parameters: Sequence[Tensor]) -> None:
    """Raise if ranks have other gradients of these parameters.

    Collective over the dimension.
    """
    if not parameters:
        return
    ranks = unit.run.collectives(name)
    mine = torch.stack([_digest(parameter.grad).to(unit.run.device) for parameter in parameters])
    found = ranks.all_gather(mine).view(ranks.size, *mine.shape).transpose(0, 1).tolist()
    norms = [max(digest[0] for digest in digests) for digests in found]
    least = NEGLIGIBLE * math.hypot(*(norm for norm in norms if math.isfinite(norm)))
    apart = [
        parameter
        for parameter, digests, norm in zip(parameters, found, norms, strict=True)
        if least < norm < math.inf and _differ(digests, TOLERANCE * norm)
    ]
    if not apart:
        return
    named = ", ".join([key for key, each in unit.named_parameters().items() if any(each is p for p in apart)])
    raise AccelError(
        f"unit {unit.name!r}: gradients of {named} differ on the ranks of {name}, which have these parameters"
        " whole and would train them apart\n"
        "where their module works on parts of sequences, heads or features, give it the style sequence or"
        " replicated_with_grad_allreduce in tensor-parallel.parallelize_plan; otherwise see that these ranks"
        " compute the same, random numbers included"
    )


def _digest(gradient: Tensor | None) -> Tensor:
    """Return the norm of a gradient and two sums of a sample; -1 for none."""
    if gradient is None:
        return torch.full((3,), -1.0)
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    values = local.detach().coalesce().values() if local.is_sparse else local.detach()
    flat = (values.abs() if values.is_complex() else values).reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLE)].float()
    angles = torch.arange(sample.numel(), device=sample.device, dtype=torch.float32)
    norm = flat.norm(dtype=torch.float64 if flat.dtype == torch.float64 else torch.float32).float()
    return torch.stack([norm, sample @ angles.cos(), sample @ angles.sin()])


def _differ(digests: Sequence[Sequence[float]], tolerance: float) -> bool:
    return any(
        abs(here - there) > tolerance
        for digest in digests[1:]
        for here, there in zip(digests[0], digest, strict=True)
    )
