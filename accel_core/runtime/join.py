"""Joining a run's processes: one process group, one stack, one config."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

import torch.distributed as dist
from attrs import evolve
from torch.distributed.distributed_c10d import PrefixStore
from torch.utils.data import get_worker_info

from accel_core.config.convert import flat
from accel_core.contract.config import InitProcessGroupKwargs
from accel_core.contract.run import live
from accel_core.distributed.process_group import is_shared, join_group, timeout_of
from accel_core.distributed.silence import end_silent
from accel_core.errors import AccelError, ConfigError

if TYPE_CHECKING:
    from accel_core.contract.config import ProjectConfiguration
    from accel_core.contract.run import Run
    from accel_core.contract.world import World

_logger = logging.getLogger(__name__)
_FOLDERS: Final = ("project_dir", "logging_dir")
"""Options of `project` that scripts often name by the time: rank 0's values hold for all ranks."""


def join_world(run: Run) -> tuple[dist.ProcessGroup, World]:
    """Join the process group, which is created if none exists. Collective.

    Returns:
        The group, and the world with the runs' store.

    Raises:
        LaunchError: the group cannot be created.
        AccelError: this process is a child of a rank, such as a DataLoader worker.
    """
    ranks = (each for each in live() if each.process != os.getpid() and each.world.size > 1)
    if get_worker_info() is not None or any(ranks):  # runs of one process do not count, as in a notebook
        raise AccelError(
            f"an Accelerator of {run.world.size} processes cannot be made in a child of one of them, such as"
            " a DataLoader's worker: the others would wait for it\n"
            "make it in the main process, and pass on what is needed, such as accelerator.process_index"
        )
    options, backends = run.config.process_group, run.communication_backends
    if dist.is_initialized() and not is_shared() and options != InitProcessGroupKwargs():
        _logger.warning(
            "process_group: the program has made the process group, whose own backend and time-out hold; give"
            " them to torch.distributed.init_process_group, or let Accelerator make the group"
        )
    group, store = join_group(lambda: run.hooks.init_process_group(run.world, backends, options))
    prefix = f"accel/{run.world.run_id}/{run.world.restart_count}"
    end_silent(store, timeout_of(run))
    return group, evolve(run.world, store=PrefixStore(prefix, store))


def backends_of(run: Run) -> dict[str, str]:
    """Return torch device type -> torch.distributed backend, for the run's device and the CPU.

    Raises:
        ConfigError: torch.distributed has no backend for the run's device type.
    """
    card, kind, usual = run.stack.device.card, run.device.type, dist.Backend.default_device_backend_map
    own = None if "collectives.own" in card.offers else card.communication_backend or usual.get(kind)
    backend = run.config.process_group.backend or own
    if backend is None and "collectives.own" not in card.offers:
        raise ConfigError(
            f"torch.distributed has no backend for {kind} tensors, but this run has {run.world.size}"
            " processes\ntrain in one process, or choose --device cpu"
        )
    return {"cpu": usual["cpu"]} | ({} if backend is None else {kind: backend})


def agree_on_run(run: Run) -> tuple[str, ProjectConfiguration]:
    """Return rank 0's run id and project folders on all ranks. Collective.

    Raises:
        ConfigError: the ranks differ in stack or config.
    """
    own = {"stack": str(run.stack), **dict(flat(run.resolved.tree))}
    folders = [own.pop(f"project.{name}", None) for name in _FOLDERS]
    ranks = run.collectives("control").all_gather_object((run.run_id, folders, own))
    for path in dict.fromkeys(path for _, _, each in ranks for path in each):
        values = [repr(each.get(path)) for _, _, each in ranks]
        if len(set(values)) > 1:
            listed = "; ".join(f"rank {number}: {value}" for number, value in enumerate(values))
            raise ConfigError(
                f"the ranks of this world do not agree on {path}: {listed}\n"
                "start all nodes with the same config, packages and Accelerator(...) arguments"
            )
    run_id, folders, _ = ranks[0]
    return run_id, evolve(run.config.project, **dict(zip(_FOLDERS, folders, strict=True)))
