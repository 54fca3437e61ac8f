"""How agents meet where no node is ever replaced: numbers as given, and bad news passed on."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accel_core.errors import LaunchError
from accel_core.hookspecs import Job
from accel_core.native.meeting import PATIENCE, address_towards, split

__all__ = ["FixedRendezvous", "rendezvous"]

NEWS: Final = "accel/failed"
NEWS_TRAVEL: Final = 1.0
"""Seconds; agents look ten times in this."""


def rendezvous(job: Job, endpoint: str, run_id: str) -> RendezvousHandler:
    """The fixed kind, or torch's c10d where several nodes may have to start again together."""
    if job.nodes == 1 or not job.max_restarts:
        return FixedRendezvous(job, endpoint, run_id)
    host = job.node_rank == 0
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=endpoint,
            run_id=run_id,
            min_nodes=job.nodes,
            max_nodes=job.nodes,
            local_addr=split(endpoint)[0] if host else address_towards(endpoint),
            is_host=host,  # torch would guess from host names, and both nodes wait for a third party
        )
    )


class FixedRendezvous(RendezvousHandler):
    """Node 0 serves a store; each node has the number it was started with.

    torch's static kind cannot take a free port, and its nodes wait half an hour for one that failed.
    """

    def __init__(self, job: Job, endpoint: str, run_id: str) -> None:
        self._host, self._port = split(endpoint)
        self._rank, self._nodes = job.node_rank, job.nodes
        self._run_id = run_id
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Called once an attempt; the nodes come together the first time."""
        if self._store is None:
            self._store = TCPStore(
                self._host,
                self._port,
                self._nodes,
                is_master=self._rank == 0,
                timeout=timedelta(seconds=PATIENCE),
                multi_tenant=True,  # the workers of this machine use it too
            )
        meeting = RendezvousStoreInfo(self._host, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), self._rank, self._nodes, meeting)

    def num_nodes_waiting(self) -> int:
        """Asked by the agent ten times a second; raises LaunchError when another node has failed."""
        if self._nodes > 1 and self._store is not None and self._is_told():
            raise LaunchError(
                f"another node failed: {self._store.get(NEWS).decode()}\n"
                "its own `accel launch` has the traceback"
            )
        return 0

    def _is_told(self) -> bool:
        assert self._store is not None
        try:
            return bool(self._store.check([NEWS]))
        except RuntimeError:  # node 0 is through and gone, which is no reason to stop
            return False

    def tell(self, news: str) -> None:
        """Let the other nodes know that this one failed."""
        if self._nodes > 1 and self._store is not None:
            try:
                self._store.set(NEWS, news)
            except RuntimeError:  # node 0 is gone, and with it whoever could be told
                return
            if self._rank == 0:
                time.sleep(NEWS_TRAVEL)  # the store ends with this process

    @property
    def use_agent_store(self) -> bool:
        """The workers use this store rather than serve one of their own."""
        return True

    def get_backend(self) -> str:
        """A name for torch's logs."""
        return "accel"

    def get_run_id(self) -> str:
        """The job's id, the same on all nodes."""
        return self._run_id

    def is_closed(self) -> bool:
        """Never: there is one meeting."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: there is one meeting."""

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with the process."""
        return True
