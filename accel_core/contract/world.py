"""The processes that take part in a run, and the topology of data over them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from attrs import Factory, asdict, field, frozen

from accel_core.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

current_operation: Final[ContextVar[object]] = ContextVar("current_operation", default="")
"""Operation for which this thread uses collectives; its `str` names the operation in errors."""

LOCAL_SIZES: Final = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
"""Variables of launchers: the number of ranks on the node."""


@frozen(kw_only=True)
class Task:
    """This process as a task that an engine started, according to the engine's own variables.

    Returned by the function `task` of a launcher's card.
    """

    size: int = 0
    """Number of tasks; 0 if unknown."""
    rank: int = 0
    local_rank: int | None = None
    """Number of the task on its node; None if unknown."""
    local_size: int | None = None
    """Number of tasks on the node; None if unknown."""
    variable: str = ""
    """The variable that gives `size`, or else `rank`."""
    launcher: str = ""
    """Launcher that joins such tasks; set by core."""


@frozen(kw_only=True)
class World:
    """The processes of one run, as this process sees them.

    Pickles (without its store), so that DataLoader workers may keep it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    restart_count: int = 0
    is_task: bool = False
    """True if an engine started this process, and may have made only its own device visible to it."""
    run_id: str | None = None
    """The launcher's id of the job, stable over elastic restarts."""
    store: Store | None = field(default=None, eq=False, repr=False)
    """A connection to the group's store, for votes; None in a world of one process.

    Set once the group is up. All runs and threads of the process share it, so a request may not wait for a
    key: call `check` before `get`. Requests fail if the store's machine is silent for long.
    """

    @classmethod
    def here(cls, task: Task | None = None) -> World:
        """Return this process's world: by the launcher's variables, else by its own process group."""
        torchs: Any = _group_of_torch()
        if torchs is None:
            return cls.from_environment(task=task)
        rank, size = torchs.get_rank(), torchs.get_world_size()
        return cls(rank=rank, size=size, local_rank=rank, local_size=size)

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, task: Task | None = None
    ) -> World:
        """Return the world of torchrun's variables; without them a world of one.

        `task` gives the place of this rank on its node, if no variable of torchrun does.

        Raises:
            LaunchError: a variable is not a number or missing, or the variables contradict each other.
        """
        environment = os.environ if environment is None else environment
        if "WORLD_SIZE" not in environment and "RANK" not in environment:
            return cls()

        task, number = task or Task(), partial(_number, environment)
        size = number("WORLD_SIZE", None)
        rank = number("RANK", None)
        if rank >= size:
            raise LaunchError(
                f"RANK={rank} does not exist in a world of WORLD_SIZE={size}\nset RANK to 0 to {size - 1}"
            )
        told = next((name for name in LOCAL_SIZES if name in environment), None)
        local_size = min(number(told, None) if told else task.local_size or size, size)
        is_told = told is not None or task.local_size is not None
        own = rank % max(local_size, 1) if task.local_rank is None else task.local_rank
        local_rank = number("LOCAL_RANK", own)
        if not local_size or (size > 1 and (local_rank >= local_size if is_told else local_rank != rank)):
            found = f"{told}={local_size}" if told else "no variable that says how many ranks a node has"
            raise LaunchError(
                f"rank {rank} of {size} has the local rank {local_rank}, and there is {found}\n"
                "set LOCAL_WORLD_SIZE to the number of ranks on this node, as `accel launch` and torchrun do,"
                f" or unset {told or 'RANK and WORLD_SIZE'}"
            )
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=number("GROUP_RANK", rank // local_size),
            nodes=number("GROUP_WORLD_SIZE", -(-size // local_size)),
            restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
            is_task=task.local_rank is not None,
            run_id=environment.get("ACCEL_RUN_ID") or _torchruns_id(environment),
        )

    def first_of_disk(self, *, each_node: bool) -> bool:
        """Return whether this rank writes for all ranks that share its disk.

        If `each_node` is True, each node has a disk of its own; else all nodes share a disk.
        """
        return (self.local_rank if each_node else self.rank) == 0

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(World, **{**asdict(self, recurse=False), "store": None}), ()


def rank_here() -> int:
    """Return this process's rank, by its process group or RANK; else 0."""
    torchs: Any = _group_of_torch()
    text = os.environ.get("RANK", "")
    return int(torchs.get_rank()) if torchs is not None else int(text) if text.isdecimal() else 0


def _group_of_torch() -> Any:
    """Return torch.distributed if this process has a group and no launcher's variables; else None."""
    torchs: Any = sys.modules.get("torch.distributed")  # a process that has a group has imported it
    has_group = torchs and torchs.is_available() and torchs.is_initialized()
    return torchs if has_group and "WORLD_SIZE" not in os.environ else None


def _number(environment: Mapping[str, str], name: str, default: int | None) -> int:
    """Return a variable of torchrun as a number.

    Raises:
        LaunchError: the variable is not a number, or is not set and has no default.
    """
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        problem = "is not set" if text is None else f"is {text!r}, not a whole number"
        there = [each for each in ("RANK", "WORLD_SIZE") if each in environment]
        raise LaunchError(
            f"the launcher's variable {name} {problem}\n"
            f"start the script with `accel launch` or `torchrun`, or unset {' and '.join(there)}"
        )
    return int(text)


def _torchruns_id(environment: Mapping[str, str]) -> str | None:
    # torchrun's default is the word "none", which unrelated jobs would share.
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    return None if run_id in (None, "", "none") else run_id


class RandomStream(NamedTuple):
    """A random generator of this process.

    Attributes:
        get: returns its state, a uint8 CPU tensor.
        set: restores such a state, or raises.
        seed: seeds it with a whole number; None if another stream's `seed` also seeds this stream.
    """

    get: Callable[[], Tensor]
    set: Callable[[Tensor], object]
    seed: Callable[[int], object] | None = None


@frozen(kw_only=True)
class Topology:
    """This rank's part of the data and of the loss. Never derived from rank and world size.

    Attributes:
        reader: number of this process's share of the data; several ranks may have the same reader (tensor
            parallel).
        readers: number of shares.
        losses: number of ranks with a loss of their own, each the mean over other samples, or other parts of
            samples.
        loss_dim: collectives (hook `collectives`) over which losses are averaged.
        gather_dim: collectives over which metrics are gathered.
    """

    reader: int = 0
    readers: int = 1
    losses: int = field(default=Factory(lambda self: self.readers, takes_self=True))
    loss_dim: str = "world"
    gather_dim: str = "world"


class Collectives(Protocol):
    """Collectives that core needs from a group of ranks. All ranks call them in the same order."""

    rank: int
    size: int

    @property
    def group(self) -> ProcessGroup | None:
        """Torch's process group of these ranks, for libraries that take a group.

        None for a rank alone, or for collectives of a library of their own.
        """

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        """Reduce in place over the group; `operation` is sum, mean, min or max."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather tensors (n, ...) of equal shape on each rank into (size * n, ...), in rank order."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor`, in place, with the tensor of the group's rank `source`."""

    def all_gather_object(self, value: Any) -> Sequence[Any]:
        """Return the picklable values of all ranks, in rank order."""

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the picklable value of the group's rank `source`."""

    def barrier(self) -> None:
        """Return once every rank of the group has called this."""
