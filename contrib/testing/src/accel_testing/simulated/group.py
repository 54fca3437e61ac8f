"""torch.distributed for the simulated device: a process group over the CPU's.

It counts the collectives it carries, which is how the kit knows what a strategy communicates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future
from torch.utils import _pytree as pytree

__all__ = ["COLLECTIVES", "SimulatedGroup", "register_group"]

COLLECTIVES: Final[Counter[str]] = Counter()
"""Operation -> calls in this process, over all simulated groups."""

# Old and new names of one operation, as far as this torch has them.
_OPERATIONS: Final = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier"),
    *("allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter"),
)
_BETWEEN_TWO: Final = ("send", "recv")


class SimulatedGroup(dist.ProcessGroup):
    """Carries simulated and plain tensors: it is its group's only backend."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        kind = dist.ProcessGroup.BackendType.GLOO
        self.inner = dist.ProcessGroup(store, rank, size)
        self.inner._register_backend(
            torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout)
        )
        self.inner._set_default_backend(kind)

    def getBackendName(self) -> str:  # noqa: N802 - torch asks by this name
        """Return the name it is registered under."""
        return "simulated"

    def _set_group_name(self, name: Any) -> None:
        self.inner._set_group_name(name)

    @property
    def group_name(self) -> Any:
        """The name by which torch's meshes find the group."""
        return self.inner.group_name


def _forward(operation: str, unwrap: Callable[[Any], Any]) -> Any:
    def call(self: SimulatedGroup, *args: Any, **kwargs: Any) -> Any:
        COLLECTIVES[operation] += 1
        inner_args, inner_kwargs = pytree.tree_map(unwrap, (args, kwargs))
        getattr(self.inner, operation)(*inner_args, **inner_kwargs).wait()
        # Inner tensors share the storage, so `args` hold the result; torch's reducer wants it as a future.
        done: Future[Any] = Future()
        done.set_result(args[0] if args else [])
        return _create_work_from_future(done)

    return call


def _begin(operation: str, unwrap: Callable[[Any], Any]) -> Any:
    # Stages of a pipeline send to each other at once, and wait afterwards.
    def call(self: SimulatedGroup, tensors: Any, *args: Any) -> Any:
        COLLECTIVES[operation] += 1
        return getattr(self.inner, operation)([unwrap(tensor) for tensor in tensors], *args)

    return call


def register_group(device: str, communication: str, unwrap: Callable[[Any], Any]) -> None:
    """Register the backend `communication` for tensors on `device`.

    unwrap: gives the CPU tensor of a simulated one, and anything else as it is.
    """
    for operation in _OPERATIONS:
        if hasattr(dist.ProcessGroup, operation):
            setattr(SimulatedGroup, operation, _forward(operation, unwrap))
    for operation in _BETWEEN_TWO:
        setattr(SimulatedGroup, operation, _begin(operation, unwrap))
    dist.Backend.register_backend(communication, SimulatedGroup, devices=[device])
