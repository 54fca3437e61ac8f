"""The module `deepspeed`: its device, and its process-wide state."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accel_core import ConfigError, join_process_group, leave_process_group

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import Run

__all__ = ["deepspeed_for", "dismantle", "leave", "quiet", "without_first_steps"]


def deepspeed_for(run: Run, user: object) -> Any:
    """Return the module `deepspeed` for the run's device, with a process group.

    Until `leave(user)`.

    Raises:
        ConfigError: it was loaded for another device.
    """
    device: Any = run.device
    kind = device.type
    _tell("DS_ACCELERATOR", os.environ.get("DS_ACCELERATOR", kind))
    if kind == "hpu":  # Intel's DeepSpeed looks for it
        _tell("DEEPSPEED_USE_HPU", "true")
    # To DeepSpeed it is the number of the device.
    index = run.world.local_rank if device.index is None else device.index
    _tell("LOCAL_RANK", str(index))
    with quiet():
        import deepspeed

        backend: Any = import_module("deepspeed.comm.torch")
    # Its own calls of torch, in each step: no user can change them.
    renamed = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    # A faster all_reduce for inference on CPUs, which training never calls: 20 s of a C++ compiler.
    backend.build_shm_op = lambda: None
    logging.getLogger("DeepSpeed").setLevel(os.environ.get("DEEPSPEED_LOG_LEVEL", "WARNING").upper())
    found = deepspeed.get_accelerator()._name
    if found != kind:
        raise ConfigError(
            f"DeepSpeed works on {found} (DS_ACCELERATOR={os.environ['DS_ACCELERATOR']}), this run on"
            f" {kind}\n"
            f"unset DS_ACCELERATOR, or set it to {kind}, before anything imports deepspeed"
        )
    join_process_group(run, user)
    _users.add(id(user))
    return deepspeed


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of DeepSpeed's own use of torch, which no user can change."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning, SyntaxWarning):
            warnings.simplefilter("ignore", kind)
        yield


@contextmanager
def without_first_steps(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Undo steps of these that an engine takes while it is made.

    Stage 0's optimizers in 16 bits make their state by a step of zeros, which decays weights and counts.
    """
    before: dict[Any, list[dict[str, Any]]] = {}

    def begin(optimizer: Any, *call: Any) -> None:
        before[optimizer] = [dict(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    def undo(optimizer: Any, *call: Any) -> None:
        for group, kept in zip(optimizer.param_groups, before.pop(optimizer), strict=True):
            group.clear()
            group.update(kept)
        optimizer.state.clear()

    handles = [
        handle
        for each in optimizers
        for handle in (each.register_step_pre_hook(begin), each.register_step_post_hook(undo))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_users: set[int] = set()
"""Ids of plugins that make engines; DeepSpeed's globals go with the last."""
_before: dict[str, str | None] = {}
"""Environment variables that were set for DeepSpeed -> their earlier values."""


def _tell(name: str, value: str) -> None:
    _before.setdefault(name, os.environ.get(name))
    os.environ[name] = value


def _restore() -> None:
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def dismantle(engine: Any) -> None:
    """Remove an engine's hooks from the user's module, and its references to process groups.

    A group that outlives the process's default one aborts some processes at exit.
    """
    with contextlib.suppress(AttributeError):  # of an engine whose making failed half way
        engine.destroy()
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
    optimizer = engine.optimizer
    offload = getattr(optimizer, "parameter_offload", None)
    for holder in (engine, optimizer, offload, *engine.module.parameters()):
        for name, value in list(vars(holder).items()) if hasattr(holder, "__dict__") else ():
            if _is_group(value) or (value is optimizer and holder is not engine):
                setattr(holder, name, None)


def _is_group(value: Any) -> bool:
    held = value if isinstance(value, (list, tuple)) else [value]
    return bool(held) and all(isinstance(each, dist.ProcessGroup) for each in held)


def leave(user: object) -> None:
    """Forget a user that has no engine any more.

    The last user removes DeepSpeed's references to process groups.
    """
    _users.discard(id(user))
    if not _users:
        _restore()
        if "deepspeed" in sys.modules:
            _forget_groups()
    leave_process_group(user)


def _forget_groups() -> None:
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    groups._release_process_group_references()
    comm.cdb = None
    gc.collect()  # engines are full of cycles that hold groups
