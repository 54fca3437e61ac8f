"""The library itself: which device it believes in, and what of it is global to the process."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from accel_core import ConfigError

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["deepspeed_for", "forget", "quiet"]


def deepspeed_for(run: Run) -> Any:
    """The module `deepspeed`, for the run's device, with a process group for it to use.

    Raises:
        ConfigError: it was loaded for another device.
    """
    kind = run.device.type
    os.environ.setdefault("DS_ACCELERATOR", kind)
    os.environ.setdefault("LOCAL_RANK", str(run.world.local_rank))
    with quiet():
        import deepspeed

    # Its own calls of torch, in each step: no user can change them.
    renamed = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    # A faster all_reduce for inference on CPUs, which training never calls: 20 s of a C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(os.environ.get("DEEPSPEED_LOG_LEVEL", "WARNING").upper())
    found = deepspeed.get_accelerator()._name
    if found != kind:
        raise ConfigError(
            f"DeepSpeed works on {found} (DS_ACCELERATOR={os.environ['DS_ACCELERATOR']}), this run on"
            f" {kind}\n"
            f"unset DS_ACCELERATOR, or set it to {kind}, before anything imports deepspeed"
        )
    if not dist.is_initialized():  # it needs a group even where there is nobody else
        backend = ",".join(
            f"{device}:{name}" for device, name in run.hooks.communication_backend(run.device).items()
        )
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        _state["alone"] = True
    return deepspeed


@contextmanager
def quiet() -> Iterator[None]:
    """Without what DeepSpeed's own use of torch is warned of: no user can change it."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning, SyntaxWarning):
            warnings.simplefilter("ignore", kind)
        yield


_state: dict[str, Any] = {}


def forget() -> None:
    """Drop what DeepSpeed keeps of the process group, which is about to end or may end at any time."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    groups._release_process_group_references()
    comm.cdb = None
    if _state.pop("alone", False) and dist.is_initialized():
        dist.destroy_process_group()
