"""The joining of a run's processes: one process group, one stack, one config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from attrs import evolve
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.utils.data import get_worker_info

from accel_core.config.convert import flat
from accel_core.distributed.process_group import shared, timeout_of
from accel_core.distributed.silence import end_silent
from accel_core.errors import AccelError, ConfigError

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    from accel_core.contract.config import ProjectConfiguration
    from accel_core.contract.run import Run
    from accel_core.contract.world import World

_FOLDERS: Final = ("project.logging_dir", "project.project_dir")
_logger = logging.getLogger(__name__)


def join_world(run: Run) -> tuple[int, World]:
    """Join the process group, which is made if there is none. Collective.

    Returns the number of the group, and the world with a store of its own.

    Raises:
        ConfigError: the group there is cannot be used.
        LaunchError: it cannot be made.
        AccelError: this process is a child of a rank, not one.
    """
    if get_worker_info() is not None or shared.is_a_parents:
        raise AccelError(
            f"an Accelerator of {run.world.size} processes cannot be made in a child of one of them, such as"
            " a DataLoader's worker: the others would wait for it\n"
            "make it in the main process, and pass on what is needed, such as accelerator.process_index"
        )
    options, backends = run.config.process_group, run.communication_backends
    if dist.is_initialized():
        _check_group(run, backends)
    group = shared.join(lambda: run.hooks.init_process_group(run.world, backends, options))
    prefix = f"accel/{run.world.run_id}/{run.world.restart_count}"
    store: Any = _get_default_store()  # torch's stub lacks `clone`
    world = evolve(run.world, store=PrefixStore(prefix, store.clone()))
    end_silent(store, timeout_of(run))
    return group, world


def backends_of(run: Run) -> dict[str, str]:
    """Return torch device type -> torch.distributed backend, of the run's device and the CPU."""
    card, kind, usual = run.stack.device.card, run.device.type, dist.Backend.default_device_backend_map
    own = None if "collectives.own" in card.offers else card.communication_backend or usual.get(kind)
    backend = run.config.process_group.backend or own
    if backend is None and "collectives.own" not in card.offers:
        raise ConfigError(
            f"torch.distributed has no backend for {kind} tensors, but this run has {run.world.size}"
            " processes\ntrain in one process, or choose --device cpu"
        )
    return {"cpu": usual["cpu"]} | ({} if backend is None else {kind: backend})


def leave_world(run: Run) -> None:
    """Leave the process group; the last run that used it ends it, if a run made it."""
    run.forget_groups()  # of one process too: what has been made would answer yet
    if run.world.size > 1:
        shared.leave(run.group)


def _check_group(run: Run, backends: Mapping[str, str]) -> None:
    """Refuse a group of this process that does not carry this run's tensors."""
    kind = run.device.type
    carried = dist.get_backend_config(dist.group.WORLD)
    if f"{kind}:{backends[kind]}" not in carried.split(","):
        raise ConfigError(
            f"this process already has a process group ({carried}) that does not carry {kind} tensors by"
            f" {backends[kind]}, as this run needs\n"
            f"make that group with backend '{kind}:{backends[kind]}', or end the run that uses it first"
        )
    asked, has = run.config.process_group.timeout, _timeout_of(run.device)
    if asked is not None and has not in (None, asked):
        raise ConfigError(
            f"process_group.timeout is {asked}, but this process already has a process group, whose"
            f" time-out is {has}\n"
            "give both the same time-out, or end the run that uses that group first"
        )


def _timeout_of(device: torch.device) -> timedelta | None:
    """Return the time-out of this process's group; None if torch does not tell."""
    assert dist.group.WORLD is not None
    try:
        options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    except RuntimeError:  # torch knows no backend of a device that a plugin carries by another's
        return None
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def agree_on_run(run: Run) -> tuple[str, ProjectConfiguration]:
    """Return the id of the run and its folders, the same on all ranks. Collective.

    Rank 0's folders hold for all: scripts name them by the time.

    Raises:
        ConfigError: the ranks differ in stack or config.
    """
    control = run.collectives("control")
    ranks = control.all_gather_object((run.run_id, str(run.stack), run.resolved.digest()))
    if len({rank[1:] for rank in ranks}) == 1:
        return run.world.run_id or ranks[0][0], run.config.project
    stacks = [rank[1] for rank in ranks]
    if len(set(stacks)) > 1:
        different, values = "stack", stacks
    else:
        trees = [dict(flat(tree)) for tree in control.all_gather_object(run.resolved.tree)]
        paths = sorted({path for tree in trees for path in tree})
        differing = [path for path in paths if len({repr(tree.get(path)) for tree in trees}) > 1]
        if not set(differing).difference(_FOLDERS):
            return run.world.run_id or ranks[0][0], _with_folders(run, trees[0])
        different = next(path for path in differing if path not in _FOLDERS)
        values = [repr(tree.get(different)) for tree in trees]
    listed = "; ".join(f"rank {number}: {value}" for number, value in enumerate(values))
    raise ConfigError(
        f"the ranks of this world do not agree on {different}: {listed}\n"
        "start all nodes with the same config, packages and Accelerator(...) arguments"
    )


def _with_folders(run: Run, first: Mapping[str, Any]) -> ProjectConfiguration:
    """Return the project's options with rank 0's folders; say where they differ."""
    project = run.config.project
    named: dict[str, Any] = {path.rpartition(".")[2]: first.get(path) for path in _FOLDERS}
    theirs = evolve(project, **named)
    if theirs != project:
        _logger.warning(
            "rank %s uses rank 0's %s in place of its own %s",
            run.world.rank,
            " and ".join(f"{name} {folder!r}" for name, folder in named.items()),
            " and ".join(repr(getattr(project, name)) for name in named),
        )
    return theirs
