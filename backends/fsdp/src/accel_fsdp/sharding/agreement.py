"""Comparison of gradients of whole parameters on ranks that split layers, in two steps of an optimizer.

For plans that forget norms of queries and keys (Qwen3 has such norms), or norms of parts of sequences.

A module that works on a rank's part of a sequence, or of heads, sees a part of the gradient. Unless the plan
says so, nothing sums these parts, and each rank trains weights of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from torch.distributed.tensor import DTensor

from accel_core import AccelError, before_step
from accel_fsdp.sharding.dims import replica_names

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_core import Unit

__all__ = ["before_update", "compare_gradients"]

STEPS: Final = 2
"""Steps that are compared: in the first one, adapters that begin at zero (LoRA) give others no gradient."""
SAMPLE: Final = 2**16
"""Elements of a gradient that are compared, besides its norm."""
TOLERANCE: Final = 0.05
"""Part of its norm by which a gradient may differ: devices may sum in any order."""
NEGLIGIBLE: Final = 64.0
"""Rounding errors of the norm of all gradients; a smaller one may be only errors."""


def compare_gradients(unit: Unit, optimizer: Optimizer) -> None:
    """Have ranks compare gradients of whole parameters in an optimizer's first steps.

    Such a step raises AccelError if ranks that split layers differ. No later step compares anything.
    """
    names = replica_names(unit.mesh) if unit.mesh is not None else []
    unit_of, steps_left = ref(unit), STEPS

    def compare(optimizer: Optimizer) -> None:
        nonlocal steps_left
        unit = unit_of()
        if not steps_left or unit is None:
            return
        steps_left -= 1
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for name in names:
            along = {*unit.mesh.group(name)} if unit.mesh is not None else set()
            _compare(unit, name, [parameter for parameter in trained if not _is_split(parameter, along)])

    if names:
        before_update(optimizer, compare)


def before_update(optimizer: Optimizer, check: Callable[[Optimizer], None]) -> None:
    """Call `check` before each step of the optimizer; in a step with a closure, after the closure."""

    def hook(optimizer: Optimizer, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
        if closure is None:
            return check(optimizer)

        def checked() -> Any:  # gradients are there when a closure has run
            loss = closure()
            check(optimizer)
            return loss

        if len(arguments) > 1:
            return (arguments[0], checked, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": checked}

    before_step(optimizer, hook)


def _is_split(parameter: Tensor, along: set[int]) -> bool:
    # By ranks: a model that was sharded before may call the dimension otherwise, such as `ep`.
    return (
        isinstance(parameter, DTensor) and len(along & {*parameter.device_mesh.mesh.flatten().tolist()}) > 1
    )


def _compare(unit: Unit, name: str, parameters: Sequence[Tensor]) -> None:
    """Raise AccelError if gradients differ on the ranks of a dimension. Collective over the dimension.

    Gradients that are missing, negligible or not finite are not compared.
    """
    if not parameters:
        return
    ranks = unit.run.collectives(name)
    mine = torch.stack([_digest(parameter.grad).to(unit.run.device) for parameter in parameters])
    found = ranks.all_gather(mine).view(ranks.size, *mine.shape).transpose(0, 1).tolist()
    norms = [max(digest[0] for digest in digests) for digests in found]
    least = _rounding(unit, parameters) * math.hypot(*(norm for norm in norms if math.isfinite(norm)))
    apart = {
        parameter
        for parameter, digests, norm in zip(parameters, found, norms, strict=True)
        if least < norm < math.inf and _differ(digests, TOLERANCE * norm)
    }
    if not apart:
        return
    named = ", ".join(key for key, each in unit.named_parameters().items() if each in apart)
    raise AccelError(
        f"unit {unit.name!r}: gradients of {named} differ on the ranks of {name}, which have these parameters"
        " whole and would train them apart\n"
        "where their module works on parts of sequences, heads or features, give it the style sequence or"
        " replicated_with_grad_allreduce in tensor-parallel.parallelize_plan; otherwise see that these ranks"
        " compute the same, random numbers included"
    )


def _rounding(unit: Unit, parameters: Sequence[Tensor]) -> float:
    """Return the part of a norm that may be rounding errors."""
    dtypes = {parameter.dtype for parameter in parameters if parameter.dtype.is_floating_point}
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    return min(1e-3, NEGLIGIBLE * coarsest) if unit.run.config.mixed_precision == "no" else 1e-3


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
