"""Parameters that get no gradient on some ranks: experts in a list, heads by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core import AccelError, before_step

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_core import Unit

__all__ = ["compare_use"]


def compare_use(unit: Unit, optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Have ranks compare, in the optimizer's first step, which parameters have a gradient.

    torch's fully_shard reduces what got a gradient on each rank, in one buffer: ranks that use different
    parameters add up gradients of different parameters, silently. If all had one in the first step, a later
    step without one is refused on the rank that lacks it.
    """
    is_first, all_had = True, False

    def compare(*call: Any) -> None:
        nonlocal is_first, all_had
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        lacking = [each for each in trained if each.grad is None]
        if is_first:
            is_first, all_had = False, not lacking
            lacking = _differing(trained, mesh, unit.run.device)
        elif not all_had or len(lacking) == len(trained):
            return
        if lacking:
            names = {parameter: name for name, parameter in unit.named_parameters().items()}
            raise AccelError(
                f"unit {unit.name!r}: {', '.join(names[each] for each in lacking[:10])} got no gradient on"
                " some ranks, or only since the first step, and fully_shard would add gradients of different"
                " parameters up\nset fsdp.find_unused_parameters: true"
            )

    before_step(optimizer, compare)


def _differing(trained: Sequence[Tensor], mesh: DeviceMesh, device: torch.device) -> list[Tensor]:
    """Return the parameters that have a gradient on some ranks only. Collective."""
    mine = [int(each.grad is not None) for each in trained]
    both = torch.tensor([mine, [-has for has in mine]], device=device)
    for dim in range(mesh.ndim):
        dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return [each for each, high, low in zip(trained, *both.tolist(), strict=True) if high != -low]
