"""The default process group, shared by the runs of a process, and collectives over torch's groups."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import define, field
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from accel_core.contract.arguments import quoted
from accel_core.contract.world import current_operation
from accel_core.distributed.exchange import Call
from accel_core.distributed.forks import keep_inherited_objects
from accel_core.distributed.silence import FAILING_SECONDS, end_silent
from accel_core.errors import CollectiveError, ConfigError, LaunchError

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor

    from accel_core.contract.config import InitProcessGroupKwargs
    from accel_core.contract.run import Run
    from accel_core.contract.world import Collectives, World

# torch 2.13 renames the function, and warns of the old name.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

WHERE: Final = ("MASTER_ADDR", "MASTER_PORT")
"""Variables by which launchers pass the address of the rendezvous."""
FINISH_SECONDS: Final = 0.1
"""Seconds for the threads of a destroyed group to release their tensors."""
GRACE_SECONDS: Final = 2.0
"""Seconds for other ranks to notice that a collective failed."""

# Kept for the life of the process: rank 0 serves the store, and a later group of the same job must find the
# same store. Each group has a prefix of its own: under the old keys gloo would read dead addresses.
_stores: dict[tuple[str | None, ...], Store] = {}
_groups_made: Counter[tuple[str | None, ...]] = Counter()
_control: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


@define
class _Shared:
    """A process group that runs use."""

    end: Callable[[], None] | None
    """Ends the group; None if the program made the group."""
    store: Store
    """A connection to the group's store that all runs share: a sweep makes many runs."""
    users: int = 0
    """Number of runs that use the group."""
    meshes: dict[tuple[str, Sequence[int], Sequence[str]], DeviceMesh] = field(factory=dict)


_shared: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()


def join_group(make: Callable[[], Callable[[], None]]) -> tuple[dist.ProcessGroup, Store]:
    """Use the process's default group, and return it with a connection to its store that all runs share.

    Args:
        make: makes the group if the process has none, and returns the function that ends the group.
    """
    end = None if dist.is_initialized() else make()
    group = dist.group.WORLD
    assert group is not None
    if group not in _shared:
        store: Any = _get_default_store()  # torch's stub lacks `clone`
        _shared[group] = _Shared(end, store.clone())
        keep_inherited_objects()
    shared = _shared[group]
    shared.users += 1
    return group, shared.store


def is_shared() -> bool:
    """Return whether runs use the process's default group already."""
    return dist.group.WORLD in _shared


def has_groups() -> bool:
    """Return whether a group that a run uses or has used is in memory."""
    return bool(_shared)


def leave_group(group: dist.ProcessGroup) -> None:
    """Stop using the group; if a run made the group, the last run that leaves it ends it."""
    shared = _shared[group]
    shared.users -= 1
    if shared.users == 0:
        shared.meshes.clear()
        _forget_results()
        if shared.end is not None and dist.group.WORLD is group:  # the program may have ended it
            shared.end()


def shared_mesh(device: str, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Return torch's mesh over all ranks, which lives as long as the group.

    The first call is collective. All runs share the mesh, because torch takes meshes of equal sizes and names
    for equal: a tensor of one mesh may get the other mesh, and with it the groups of another run.
    """
    assert dist.group.WORLD is not None
    meshes, key = _shared[dist.group.WORLD].meshes, (device, sizes, names)
    if key not in meshes:
        meshes[key] = init_device_mesh(device, tuple(sizes), mesh_dim_names=tuple(names))
    return meshes[key]


def _forget_results() -> None:
    """Clear torch's caches of DTensor operations, which hold meshes, and through them groups."""
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if tensor is not None:
        tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
        if clear is not None:
            clear()


def create(world: World, backends: Mapping[str, str], options: InitProcessGroupKwargs) -> None:
    """Make the default process group. Collective over the world.

    Raises:
        LaunchError: the rendezvous failed (no address, a port in use, ranks that never came), or torch does
            not have the backend.
    """
    timeout = options.timeout or dist.distributed_c10d.default_pg_timeout
    try:
        root, key = _root_store(world, options)
        count = _groups_made[key]
        _groups_made[key] += 1
        prefix = f"accel/{world.run_id}/{world.restart_count}/{count}"
        dist.init_process_group(
            _spelled(backends),
            store=PrefixStore(prefix, root),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
        )
    except (dist.DistError, RuntimeError, ValueError, AssertionError) as error:
        raise LaunchError(
            f"rank {world.rank} of {world.size} could not join the process group at"
            f" {os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
            f" ({', '.join(sorted(set(backends.values())))})\n{error}\n"
            "check that every rank was started, that the address is reachable and the port is free",
            rank=world.rank,
        ) from error


def _root_store(world: World, options: InitProcessGroupKwargs) -> tuple[Store, tuple[str | None, ...]]:
    method = options.init_method or "env://"
    if method == "env://" and (unset := [name for name in WHERE if name not in os.environ]):
        raise LaunchError(
            f"rank {world.rank} of {world.size} does not know where ranks meet: {unset[0]} is not set\n"
            "start the script with `accel launch` or `torchrun`, or unset RANK and WORLD_SIZE",
            rank=world.rank,
        )
    key = (method, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), str(world.restart_count))
    if key not in _stores:
        timeout = options.timeout or dist.distributed_c10d.default_pg_timeout
        _stores[key], _, _ = next(rendezvous(method, world.rank, world.size, timeout=timeout))
    return _stores[key], key


def control_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Return a group for CPU tensors and objects beside the default group. The first call is collective."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _control:
        _control.clear()  # entries of groups that were destroyed meanwhile
        backend = dist.Backend.default_device_backend_map["cpu"]
        _control[world] = dist.new_group(backend=backend, timeout=timeout)
    return _control[world]


def _spelled(backends: Mapping[str, str]) -> str:
    # If the only backend is spelled with its device, torch warns at the end of each group.
    if len(backends) == 1:
        return next(iter(backends.values()))
    return ",".join(f"{device}:{name}" for device, name in backends.items())


def destroy() -> None:
    """Undo `create`.

    A control group that is still referenced at exit may abort the process.
    """
    _control.clear()
    dist.destroy_process_group()
    # A thread of the group drops the tensors of a collective after it has woken the threads that wait for the
    # result. It needs the interpreter's lock, and aborts the process if it takes the lock while Python ends.
    time.sleep(FINISH_SECONDS)


class TorchCollectives:
    """Collectives over a process group of torch, for tensors on `device`.

    If torch's collective fails or times out, methods raise CollectiveError with the ranks that did not take
    part.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        assert group is not None
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        summed = _REDUCE["sum" if operation == "mean" else operation]
        self._call("all_reduce", dist.all_reduce, tensor, summed)
        return tensor.div_(self.size) if operation == "mean" else tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self._call("all_gather", _gather, gathered, tensor.contiguous())
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        self._call("broadcast", dist.broadcast, tensor, group_src=source)
        return tensor

    def all_gather_object(self, value: Any) -> Sequence[Any]:
        values: list[Any] = [None] * self.size
        self._call("all_gather_object", dist.all_gather_object, values, value)
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        values = [value]
        self._call("broadcast_object", dist.broadcast_object_list, values, group_src=source)
        return values[0]

    def barrier(self) -> None:
        self._call("barrier", dist.barrier)

    def _call(self, operation: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, group=self.group, **options)
        except RuntimeError as error:
            tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
            call = Call(operation, tensors[-1] if tensors else None)
            raise self._failure(current_operation.get() or call, error) from error

    def _failure(self, call: Any, error: RuntimeError) -> CollectiveError:
        """Return torch's error as a CollectiveError that names the ranks that did not take part.

        Each rank whose collective fails writes its call into the store, and reads the calls of other ranks.
        """
        ranks, text = dist.get_process_group_ranks(self.group), str(call)
        waiting = _waiting((call.name, text), ranks)
        # Compared by name only: inputs may differ.
        absent = [rank for rank in ranks if rank not in waiting or waiting[rank][0] != call.name]
        elsewhere = [f"  rank {rank} waits in {waiting[rank][1]}\n" for rank in absent if rank in waiting]
        listed = ", ".join(map(str, absent))
        happened = f"rank {dist.get_rank()} waited for rank(s) {listed} of {len(ranks)}, which did not come"
        return CollectiveError(
            f"{text}: {happened if absent else 'failed on all its ranks'}\n"
            f"{''.join(elsewhere)}{str(error).splitlines()[0]}\n"
            "look at what those ranks did: they died, hang, or took another branch;"
            " process_group.timeout says how long the others wait",
            operation=text,
            found=[waiting.get(rank, ("", ""))[1] for rank in ranks],
        )


def timeout_of(run: Run) -> float:
    """Return the seconds that a collective of the run may wait."""
    return (run.config.process_group.timeout or dist.distributed_c10d.default_pg_timeout).total_seconds()


def _waiting(own: tuple[str, str], ranks: Sequence[int]) -> dict[int, Sequence[str]]:
    """Publish this rank's call (name, text), and return the calls of the ranks that wait, by rank."""
    end_silent(_get_default_store(), FAILING_SECONDS)
    store = PrefixStore("accel/waiting", _get_default_store())
    deadline = time.monotonic() + GRACE_SECONDS
    noted: list[int] = []
    try:
        store.set(str(dist.get_rank()), json.dumps(own))
        while len(noted) < len(ranks) and time.monotonic() < deadline:
            noted = [rank for rank in ranks if store.check([str(rank)])]
            time.sleep(0.05)
        return {rank: json.loads(store.get(str(rank))) for rank in noted}
    except RuntimeError:  # the store went down with the rank that served it
        return {rank: own for rank in ranks if rank}


class Alone:
    """Collectives of a world of one."""

    rank = 0
    size = 1
    group = None

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def all_gather_object(self, value: Any) -> Sequence[Any]:
        return [value]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value

    def barrier(self) -> None:
        return None


def collectives_over(run: Run, dim: str) -> Collectives:
    """Return the collectives over "world", "control", "alone", or mesh dimensions joined by "+"."""
    if run.world.size == 1 or dim == "alone":
        return Alone()
    if dim == "world":
        return TorchCollectives(dist.group.WORLD, run.device)
    if dim == "control":
        control = control_group(run.config.process_group.timeout)
        return TorchCollectives(control, torch.device("cpu"))
    mesh, names = run.mesh, tuple(dim.split("+"))
    known = mesh.names() if mesh else ()
    if mesh is None or not set(names) <= set(known):
        has = ", ".join(("world", "control", "alone", *known))
        raise ConfigError(f"this run has no mesh dimension {quoted(dim)}\nname one that it has: {has}")
    along = mesh.device_mesh[names]._flatten(dim)
    return TorchCollectives(along.get_group(), run.device)
