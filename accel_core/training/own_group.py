"""The process group of a world of one, for libraries that work only inside a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

if TYPE_CHECKING:
    from accel_core.contract.run import Run

_users: set[int] = set()
"""Ids of the users of a group that was made here; empty if there is none."""


def join_process_group(run: Run, user: object) -> None:
    """Make sure that this process has a default process group until `leave_process_group(user)`.

    A run of several ranks has its group already, and nothing happens. Core makes no group for a run of one
    process, so this function makes a group of one, which all strategies of the process share. Not collective.

    Args:
        run: the run, for the communication backends of its devices.
        user: the plugin or run that needs the group; joining twice is the same as joining once.

    Raises:
        RuntimeError: torch has no such communication backend.
    """
    if not dist.is_initialized():
        backend = ",".join(f"{device}:{name}" for device, name in run.communication_backends.items())
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        _users.clear()  # of a group that the program has destroyed
        _users.add(id(user))
    elif _users:
        _users.add(id(user))


def leave_process_group(user: object) -> None:
    """Leave the group of one; the last user destroys it. Groups from elsewhere stay. Not collective."""
    if id(user) in _users:
        _users.remove(id(user))
        if not _users and dist.is_initialized():
            dist.destroy_process_group()
