"""How the processes of a run come together: one process group, one stack, one config."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from attrs import evolve
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.utils.data import get_worker_info

from accel_core.config.convert import flat
from accel_core.distributed import watch
from accel_core.distributed.process_group import shared
from accel_core.errors import AccelError, ConfigError

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    from accel_core.contract.mesh import Mesh
    from accel_core.contract.run import Run

__all__ = ["join", "leave"]


def join(run: Run) -> None:
    """Join the process group, which is made if there is none, and agree on the run's id. Collective.

    Raises:
        ConfigError: the ranks differ in stack or config, or the group there is cannot be used.
        LaunchError: it cannot be made.
        AccelError: this process is a child of a rank, not one.
    """
    run.run_id = run.world.run_id or uuid.uuid4().hex
    if run.world.size == 1:
        return
    if get_worker_info() is not None or shared.is_a_parents:
        raise AccelError(
            f"an Accelerator of {run.world.size} processes cannot be made in a child of one of them, such as"
            " a DataLoader's worker: the others would wait for it\n"
            "make it in the main process, and pass on what is needed, such as accelerator.process_index"
        )
    asked = run.config.process_group.backend
    # Who names a backend is not refused for lack of the device's own.
    backends = dict({run.device.type: asked} if asked else run.hooks.communication_backend(run.device))
    backends.setdefault("cpu", dist.Backend.default_device_backend_map["cpu"])
    if dist.is_initialized():
        _check_group(run, backends)
    options = run.config.process_group
    run.group = shared.join(lambda: bool(run.hooks.init_process_group(run.world, backends, options)))
    store = _get_default_store()
    prefix = f"accel/{run.world.run_id}/{run.world.restart_count}"
    clones: Any = store  # torch's stub lacks `clone`
    run.world = evolve(run.world, store=PrefixStore(prefix, clones.clone()))
    serves = run.world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    watch.start(PrefixStore(prefix, clones.clone()), run.world, serves=serves)
    try:
        _compare_ranks(run)
    except ConfigError:
        leave(run)
        raise


def leave(run: Run) -> None:
    """Leave the process group; the last run that used it ends it, if a run made it."""
    if run.world.size > 1:
        watch.stop()
        groups = _groups_of(run.forget_groups())
        shared.leave(run.group, run.hooks.destroy_process_group)
        for group in (
            groups if dist.is_initialized() else ()
        ):  # the default one is the user's, or others use it
            dist.destroy_process_group(group)


def _groups_of(meshes: Iterable[Mesh]) -> set[dist.ProcessGroup]:
    """The process groups of the dimensions of these meshes, without the default one."""
    torchs = [mesh.device_mesh for mesh in meshes if isinstance(mesh.device_mesh, DeviceMesh)]
    torchs += [flat for mesh in torchs for flat in getattr(mesh, "_flatten_mapping", {}).values()]
    return {group for mesh in torchs for group in mesh.get_all_groups()} - {dist.group.WORLD}


def _check_group(run: Run, backends: Mapping[str, str]) -> None:
    """A group that this process already has must carry this run's tensors too."""
    kind = run.device.type
    found = dist.get_backend_config(dist.group.WORLD)
    if f"{kind}:{backends[kind]}" not in found.split(","):
        raise ConfigError(
            f"this process already has a process group ({found}) that does not carry {kind} tensors by"
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
    """The time-out of the group that this process has; None where torch does not tell."""
    assert dist.group.WORLD is not None
    try:
        options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    except RuntimeError:  # torch knows no backend of a device that a plugin carries by another's
        return None
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def _compare_ranks(run: Run) -> None:
    """Refuse a world whose ranks chose or were given different things; agree on the run's id."""
    control = run.collectives("control")
    mine = (run.run_id, str(run.stack), run.resolved.digest())
    ranks = control.all_gather_object(mine)
    run.run_id = run.world.run_id or ranks[0][0]
    if len({rank[1:] for rank in ranks}) == 1:
        return
    stacks = [rank[1] for rank in ranks]
    if len(set(stacks)) > 1:
        different, found = "stack", stacks
    else:
        trees = [dict(flat(tree)) for tree in control.all_gather_object(run.resolved.tree)]
        paths = sorted({path for tree in trees for path in tree})
        different = next(path for path in paths if len({repr(tree.get(path)) for tree in trees}) > 1)
        found = [repr(tree.get(different)) for tree in trees]
    listed = "; ".join(f"rank {number}: {value}" for number, value in enumerate(found))
    raise ConfigError(
        f"the ranks of this world do not agree on {different}: {listed}\n"
        "start all nodes with the same config, packages and Accelerator(...) arguments"
    )
