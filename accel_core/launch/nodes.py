"""The nodes of a job: the rendezvous of their launchers, which also tells them that the job has failed.

In an elastic job torch numbers the nodes. In a job of a fixed number of nodes, nodes keep the user's numbers.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from accel_core.distributed.silence import end_silent
from accel_core.errors import LaunchError
from accel_core.launch.addresses import address_towards, show_waiting

if TYPE_CHECKING:
    from accel_core.contract.job import Job

AGAIN_SECONDS: Final = 120
"""Time in which all nodes must come to a restart: torch gives workers 30 s to end."""
SILENT_SECONDS: Final = 30.0
"""Time without an answer after which node 0 counts as gone."""
SPREAD_SECONDS: Final = 1.0
"""Time in which every node reads that another has ended the job."""


class NodeFailedError(LaunchError):
    """Another node has ended the job."""


class _JoinTimeout(RendezvousTimeout):
    """torch's timeouts. The time for nodes to join is shortened once all nodes have met."""

    join = timedelta()


class Nodes(RendezvousHandler):
    """The nodes of a job, in its attempts. Node 0 serves a store, for launchers and for workers."""

    attempt = -1
    """Number of the attempt that runs, equal on all nodes."""
    _is_cut_off = False
    """Node 0 has not answered."""

    def __init__(self, job: Job, host: str, port: int, seconds: int, poll: Callable[[], None]) -> None:
        """Connect to node 0.

        Args:
            job: the job.
            host: address of node 0.
            port: port of the store; 0: any free port.
            seconds: time for which nodes wait for each other.
            poll: called ten times a second while workers run.
        """
        self._job, self._poll = job, poll
        self.store: Any = TCPStore(  # torch's stub lacks some methods
            host,
            port,
            is_master=job.node_rank == 0,
            timeout=timedelta(seconds=seconds),
            multi_tenant=True,  # the workers of this machine use it too
            use_libuv=os.environ.get("USE_LIBUV") != "0",
        )
        self._place = RendezvousStoreInfo(host, self.store.port)
        self._handler: DynamicRendezvousHandler | None = (
            self._meeting(host, port, seconds) if job.nodes > 1 else None
        )

    def _meeting(self, host: str, port: int, seconds: int) -> DynamicRendezvousHandler:
        # With the store that torch shares, a node that joins later would wait for the store's address.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        end_silent(self.store, SILENT_SECONDS)  # the store is polled for waiting nodes, and must not block
        self._timeout = _JoinTimeout()
        self._timeout.join = timedelta(seconds=seconds)
        handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            self.get_run_id(),
            self.store,
            C10dRendezvousBackend(self.store, self.get_run_id()),
            self._job.min_nodes or self._job.nodes,
            self._job.nodes,
            local_addr=address_towards(host, port),
            timeout=self._timeout,
        )
        return handler

    def next_rendezvous(self) -> RendezvousInfo:
        """Return once enough nodes have joined: all nodes, unless the job is elastic."""
        job = self._job
        if self._handler is None:
            self.attempt += 1
            return RendezvousInfo(PrefixStore(f"accel/{self.attempt}", self.store), 0, 1, self._place)
        if job.min_nodes is None:
            self._claim_number()
        place = f"{self._place.master_addr}:{self._place.master_port}"
        waits = f"node {job.node_rank} of {job.nodes} waits for"
        try:
            with show_waiting(lambda: f"{waits} {self._missing()} at {place}"):
                info = self._handler.next_rendezvous()
        except RendezvousError:
            if self._handler.is_closed():  # raises if node 0 is gone
                raise self._failure() from None
            raise LaunchError(
                f"node {job.node_rank} of {job.nodes} waited {self._timeout.join.total_seconds():.0f} s at"
                f" {place} for {self._missing()}\n"
                "start each node with the same command, and with a --node-rank of its own, from 0"
            ) from None
        if job.min_nodes is None:
            info = RendezvousInfo(info.store, job.node_rank, job.nodes, self._place)
            self._timeout.join = timedelta(seconds=AGAIN_SECONDS)
        # torch counts restarts per node; workers need a number that is equal on all nodes.
        if info.rank == 0:
            info.store.set("accel/attempt", str(self.store.add("accel/attempts", 1) - 1))
        self.attempt = int(info.store.get("accel/attempt"))
        return RendezvousInfo(info.store, info.rank, info.world_size, self._place)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to start again or to join.

        Raises:
            NodeFailedError: another node has ended the job.
        """
        self._poll()
        with suppress(RendezvousError):  # node 0 is gone: the errors of the workers say more
            if self._handler is not None and not self._is_cut_off:
                self._is_cut_off = True
                if self._handler.is_closed():
                    raise self._failure()
                waiting = int(self._handler.num_nodes_waiting())
                self._is_cut_off = False
                return waiting
        return 0

    def end(self, failure: LaunchError | None) -> None:
        """End the job on all nodes, which then report this node's failure, if there is one."""
        if self._handler is None:
            return
        with suppress(DistError, RendezvousError):  # node 0 is gone
            if failure is not None:
                first = str(failure).partition("\n")[0]
                told = json.dumps([first, failure.exit_code, platform.node() or "?"])
                self.store.compare_set("accel/failure", "", told)
            self._handler.shutdown()
            if failure is not None and self._job.node_rank == 0:
                time.sleep(SPREAD_SECONDS)  # the store may end with this process

    def get_backend(self) -> str:
        """Return the name of the handler in torch's registry."""
        return "accel"

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return os.environ.get("ACCEL_RUN_ID", "accel")

    @property
    def use_agent_store(self) -> bool:
        """True: ranks meet at node 0's store, which lives as long as the job."""
        return True

    def is_closed(self) -> bool:
        """Return False: `num_nodes_waiting` raises instead."""
        return False

    def set_closed(self) -> None:
        """Do nothing: `end` closes the rendezvous."""

    def shutdown(self) -> bool:
        """Do nothing at the end of an attempt: the next attempt needs the rendezvous."""
        return True

    def _claim_number(self) -> None:
        """Claim this node's number for the next attempt.

        Raises:
            LaunchError: another launcher has claimed the number.
        """
        job, mine = self._job, f"node {self._job.node_rank} ({platform.node()}) {secrets.token_hex(8)}"
        if self.store.compare_set(self._key(job.node_rank), "", mine).decode() != mine:
            raise LaunchError(
                f"two launchers at {self._place.master_addr}:{self._place.master_port} say that they are node"
                f" {job.node_rank} of {job.nodes}\n"
                "give each node a --node-rank of its own, from 0; a lost node can rejoin only if all nodes"
                " were started with --min-nodes"
            )

    def _missing(self) -> str:
        """Return text that names the nodes that have not come to the next attempt."""
        if self._job.min_nodes is not None:
            return "other nodes to join"
        numbers = range(self._job.nodes)
        absent = [str(number) for number in numbers if not self.store.check([self._key(number)])]
        return f"node{'s' * (len(absent) > 1)} {', '.join([*absent[:8], *['...'] * (len(absent) > 8)])}"

    def _key(self, number: int) -> str:
        return f"accel/{self.attempt + 1}/here/{number}"

    def _failure(self) -> NodeFailedError:
        """Return an error that describes the failure of the node that has ended the job."""
        told = self.store.get("accel/failure") if self.store.check(["accel/failure"]) else None
        self._handler = None  # node 0 may end soon, so it is not asked again
        # Engines end all nodes when the first launcher ends: let the failing node end first and tell more.
        time.sleep(2 * SPREAD_SECONDS)
        if told is None:
            return NodeFailedError("another node has ended the job\nits own `accel launch` says why")
        first, code, host = json.loads(told)
        return NodeFailedError(
            f"another node failed: {first}\nits own `accel launch`, on {host}, has the traceback",
            exit_code=code,
        )
