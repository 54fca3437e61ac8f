"""The ranks of a process group, for saves and loads that use `torch.distributed` without an Accelerator."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, default_pg_timeout

from accel_core.storage.ranks import StoreMailbox, agree

if TYPE_CHECKING:
    from accel_core.storage.protocols import Measure

T = TypeVar("T")
TIMEOUT: Final[timedelta] = default_pg_timeout
"""Time to wait for a rank: torch's default timeout of collectives."""


class GroupComm:
    """The ranks of a process group: see `Comm` in `accel_core.storage.protocols`. Creating it is collective.

    The object has a weak reference to the group: a gloo group that is alive at exit may abort the process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)
        store: Any = _get_default_store()  # torch's stub lacks `clone`
        self._store = PrefixStore("accel/storage", store.clone())
        self.rank = dist.get_rank(group)
        hosts = self._gather(socket.gethostname())
        numbers = list(dict.fromkeys(hosts))
        self.nodes: Sequence[int] = [numbers.index(host) for host in hosts]

    @staticmethod
    def of(group: dist.ProcessGroup) -> GroupComm:
        """Return the ranks of a group. The first call for a group is collective."""
        if group not in _made:
            _made[group] = GroupComm(group)
        return _made[group]

    def _gather(self, value: Any) -> Sequence[Any]:
        group = self._group()
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    def together(self, step: str, action: Callable[[], T]) -> Sequence[T]:
        """Run the action on all ranks; return all results in rank order, or raise on all. Collective."""
        return agree(self._gather, step, action)

    def mailbox(self, key: str) -> StoreMailbox:
        """Return a mailbox whose messages have this prefix."""
        return StoreMailbox(self._store, self.rank, TIMEOUT.total_seconds(), key)

    def shown(self, text: str, measure: Measure | None = None) -> AbstractContextManager[object]:
        """Show nothing."""
        del text, measure
        return nullcontext()


_made: WeakKeyDictionary[dist.ProcessGroup, GroupComm] = WeakKeyDictionary()
