"""The process group of a world of one: core needs none there, torch's FSDP does.

Counted by run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["join", "leave"]

_users: set[int] = set()


def join(run: Run) -> None:
    """Use the group; it is made for the first run that does."""
    if not dist.is_initialized():
        named = ",".join(f"{device}:{name}" for device, name in run.communication_backends.items())
        dist.init_process_group(named, store=HashStore(), rank=0, world_size=1)
        _users.clear()
        _users.add(0)
    if _users:
        _users.add(id(run))


def leave(run: Run) -> None:
    """Stop using it; the last run that does destroys it."""
    _users.discard(id(run))
    if _users == {0}:
        _users.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
