"""The backend of torch.distributed that carries a device's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["refused_carrier"]


def refused_carrier(run: Run, plugin: str) -> Sequence[str]:
    """Return the reason why DTensors of the run's device cannot be gathered, if any.

    torch's gloo reads a device's memory as the host's own when it gathers DTensors, which ends the process:
    https://github.com/pytorch/pytorch/issues/132471.
    """
    kind = run.device.type
    if kind == "cpu" or run.world.size == 1 or not dist.is_initialized():
        return ()
    if f"{kind}:gloo" not in dist.get_backend_config(dist.group.WORLD).split(","):
        return ()
    reason = (
        f"{plugin!r} would gather {kind} tensors over gloo, where torch ends the process without an error"
        " (pytorch/pytorch#132471)\n"
        f"leave process_group.backend unset, with a {kind} device for each process; or train on the CPU:"
        " --device cpu"
    )
    return (reason,)
