"""torch's elastic agent, with what it lacks: a free port, and failures told to the other nodes."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from accel_core.errors import LaunchError
from accel_core.native.failure import first_failure
from accel_core.native.meeting import address_towards

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from accel_core.hookspecs import Job

__all__ = ["Agent", "Gathering", "Meeting", "meet"]

STOPPED: Final = "accel/stopped"
NEWS_TRAVEL: Final = 1.0
"""Seconds; agents look ten times in this."""


class Meeting(StaticTCPRendezvous):
    """torch's, whose nodes keep the numbers they were started with; port 0 is a free one."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Called once an attempt; the nodes come together the first time."""
        if self._store is None:
            address = self.master_addr, self.master_port
            self._store = _store(*address, self.timeout, serves=self.rank == 0, nodes=self.world_size)
            self.master_port = self._store.port
        return super().next_rendezvous()


class Gathering(DynamicRendezvousHandler):
    """torch's, of nodes that come and go; each time they come together they are numbered anew."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Called once an attempt."""
        self._bootstrap_store_info = None  # torch would keep that of a first node that is gone
        return super().next_rendezvous()

    @property
    def meetings(self) -> int:
        """How often nodes came together before this time: the same on all of them."""
        return int(self._state_holder.state.round)


def meet(host: str, port: int, job: Job, run_id: str, patience: int) -> RendezvousHandler:
    """How the job's nodes come together. Node 0 serves the place, and a job that lost it ends."""
    if job.min_nodes is None:
        return Meeting(host, port, job.node_rank, job.nodes, run_id, patience)
    timeout = timedelta(seconds=patience)
    store = _store(host, port, timeout, serves=job.node_rank == 0)
    gathering: Gathering = Gathering.from_backend(
        run_id,
        store,
        C10dRendezvousBackend(store, run_id),
        job.min_nodes,
        job.nodes,
        local_addr=address_towards(host, port),
        timeout=RendezvousTimeout(join=timeout),
    )
    return gathering


def _store(host: str, port: int, timeout: timedelta, *, serves: bool, nodes: int | None = None) -> TCPStore:
    return TCPStore(
        host,
        port,
        nodes,
        is_master=serves,
        timeout=timeout,
        multi_tenant=True,  # the workers of this machine use it too
        use_libuv=os.environ.get("USE_LIBUV") != "0",
    )


class Agent(LocalElasticAgent):
    """torch's; those of several nodes restart together, and none waits for a node that failed."""

    failure: LaunchError | None = None
    """Why the last attempt ended, if it failed."""

    def _rendezvous(self, worker_group: Any) -> None:
        super()._rendezvous(worker_group)
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, Gathering):
            # Only a node that failed has counted it; workers go by one count, on all nodes.
            self._remaining_restarts = worker_group.spec.max_restarts - handler.meetings

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.failure = first_failure(result.failures)
            self.tell(self._attempt, str(self.failure).splitlines()[0])
        elif result.state == WorkerState.HEALTHY and self._is_told(worker_group.group_world_size):
            result = RunResult(state=WorkerState.FAILED)
        if result.is_failed() and self._remaining_restarts > 0:
            spec, reason = worker_group.spec, str(self.failure).splitlines()[0]
            attempt = spec.max_restarts - self._remaining_restarts + 1
            sys.stderr.write(f"accel: {reason}; restart {attempt} of {spec.max_restarts}\n")
        return result

    @property
    def _attempt(self) -> str:
        return f"accel/failed/{self._remaining_restarts}"

    def _is_told(self, nodes: int) -> bool:
        """Whether another node failed in this attempt, or was stopped."""
        if nodes == 1 or self._store is None:
            return False
        with suppress(RuntimeError):  # node 0 is through and gone, which is no reason to stop
            key = next((key for key in (STOPPED, self._attempt) if self._store.check([key])), None)
            if key is not None:
                news = self._store.get(key).decode()
                self.failure = LaunchError(
                    f"another node failed: {news}\nits own `accel launch` has the traceback"
                )
                if key == STOPPED:
                    self._remaining_restarts = 0
                return True
        return False

    def tell(self, key: str, news: str) -> None:
        """Let the other nodes know that this one failed."""
        group = self.get_worker_group()
        if self._store is not None and group.group_world_size > 1:
            with suppress(RuntimeError):  # node 0 is gone, and with it whoever could be told
                self._store.set(key, news)
                if group.group_rank == 0:
                    time.sleep(NEWS_TRAVEL)  # the store may end with this process
