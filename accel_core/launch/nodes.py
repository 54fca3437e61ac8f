"""Rendezvous handlers for torch's agent: how the launchers of a job meet, and hear of each other's failures.

torch asks a handler ten times a second whether nodes wait to join. What a handler raises then ends the
attempt on this node.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from accel_core.distributed.silence import end_silent
from accel_core.errors import LaunchError
from accel_core.launch.addresses import address_towards, show_waiting

if TYPE_CHECKING:
    from accel_core.contract.job import Job

POLL_SECONDS: Final = 0.1
AGAIN_SECONDS: Final = 120
"""Time in which all nodes come to a restart: torch gives workers 30 s to end."""
SILENT_SECONDS: Final = 30.0
"""Time for which node 0 may be silent when nodes meet again."""
LOST_SECONDS: Final = 6.0
"""Time without a sign of life after which a node counts as lost."""
SPREAD_SECONDS: Final = 1.0
"""Time in which every node reads what another has announced."""


class NodeFailedError(LaunchError):
    """Another node has announced that it failed."""


class FixedNodes(StaticTCPRendezvous):
    """Nodes that have their numbers from the user, and start each attempt together.

    Node 0 serves a store, for launchers and for workers.

    poll: called ten times a second while workers run.
    """

    attempt = -1
    """Number of the attempt that runs, equal on all nodes."""
    others: Others | None = None
    """The other nodes, which hear of a failure of this one, if there are any."""

    def __init__(self, job: Job, host: str, port: int, seconds: int, poll: Callable[[], None]) -> None:
        run_id = os.environ.get("ACCEL_RUN_ID", "accel")
        super().__init__(host, port, job.node_rank, job.nodes, run_id, seconds)
        self.poll = poll
        self.store: Any = TCPStore(  # torch's stub lacks some methods
            host,
            port,
            is_master=self.rank == 0,
            timeout=self.timeout,
            multi_tenant=True,  # the workers of this machine use it too
            use_libuv=os.environ.get("USE_LIBUV") != "0",
        )
        self.place = RendezvousStoreInfo(host, self.store.port)

    def get_backend(self) -> str:
        """Return the name by which torch's registry knows the handler."""
        return "accel"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return once all nodes are there."""
        self.attempt += 1
        if self.world_size > 1:
            self._meet()
        store = PrefixStore(f"accel/{self.attempt}", self.store)
        return RendezvousInfo(store, self.rank, self.world_size, self.place)

    def num_nodes_waiting(self) -> int:
        """Return 0: no node joins. Raises NodeFailedError if another node failed."""
        self.poll()
        if self.others is not None:
            self.others.raise_announced()
        return 0

    def set_closed(self) -> None:
        """Do nothing: the other nodes end with this one."""

    def end(self) -> None:
        """End the thread."""
        if self.others is not None:
            self.others.end()

    def _meet(self) -> None:
        store, node, nodes = self.store, self.rank, self.world_size
        seconds, place = self.timeout.total_seconds(), f"{self.master_addr}:{self.place.master_port}"
        if self.attempt:
            self.end()
            end_silent(store, SILENT_SECONDS)
            seconds = AGAIN_SECONDS
        keys = [f"accel/{self.attempt}/here/{number}" for number in range(nodes)]
        mine = f"node {node} ({platform.node()}) {secrets.token_hex(8)}"
        if store.compare_set(keys[node], "", mine).decode() != mine:
            raise LaunchError(
                f"two launchers at {place} say that they are node {node} of {nodes}\n"
                "give each node a --node-rank of its own, from 0; a lost node can rejoin only if all nodes"
                " were started with --min-nodes"
            )
        self.others = Others(store.clone(), node, f"accel/{self.attempt}", keys)

        def missing() -> str:
            absent = [str(number) for number, key in enumerate(keys) if not store.check([key])]
            return f"node{'s' * (len(absent) > 1)} {', '.join([*absent[:8], *['...'] * (len(absent) > 8)])}"

        deadline = time.monotonic() + seconds
        with show_waiting(lambda: f"node {node} of {nodes} waits for {missing()} at {place}"):
            while not store.check(keys):
                self.others.raise_announced()
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"node {node} of {nodes} waited {seconds:.0f} s at {place} for {missing()}\n"
                        "start each node with the same command, and with a --node-rank of its own, from 0"
                    )
                time.sleep(POLL_SECONDS)
        self.others.first_node = _name(store, keys[0])


class ElasticNodes(FixedNodes):
    """Nodes that come and go, and are numbered anew by torch each time."""

    def __init__(self, job: Job, host: str, port: int, seconds: int, poll: Callable[[], None]) -> None:
        super().__init__(job, host, port, seconds, poll)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a node that joins would wait for its address
        end_silent(self.store, SILENT_SECONDS)  # it is asked all the time for nodes that wait
        self._handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            self.run_id,
            self.store,
            C10dRendezvousBackend(self.store, self.run_id),
            job.min_nodes or job.nodes,
            job.nodes,
            local_addr=address_towards(host, port),
            timeout=RendezvousTimeout(join=timedelta(seconds=seconds)),
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Return once torch has met enough nodes."""
        with show_waiting("this node waits for others to join"):
            info = self._handler.next_rendezvous()
        # torch counts the restarts of each node; workers need a number that all of them know.
        if info.rank == 0:
            info.store.set("accel/attempt", str(self.store.add("accel/attempts", 1) - 1))
        self.attempt = int(info.store.get("accel/attempt"))
        return RendezvousInfo(info.store, info.rank, info.world_size, self.place)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join. Raises LaunchError if a node has ended the job."""
        self.poll()
        if self._handler.is_closed():
            raise LaunchError("another node failed, with no restarts left\nits own `accel launch` says why")
        return int(self._handler.num_nodes_waiting())

    def set_closed(self) -> None:
        """Have the other nodes end: this one has failed for good."""
        self._handler.set_closed()


class Others(threading.Thread):
    """The other nodes in one attempt: what they announce, and which of them are lost.

    A request to the store of a machine that is cut off lasts as long as the network stack waits, so no
    other thread makes one. Each node counts up a key of its own. When a failure was announced, node 0 sees
    whose key stands still, and says so.

    here: the key of each node with its name.
    """

    def __init__(self, store: Any, node: int, prefix: str, here: list[str]) -> None:
        super().__init__(name="accel-nodes", daemon=True)
        self._store, self._node, self._here = store, node, here
        self._failed, self._lost = f"{prefix}/failed", f"{prefix}/lost"
        self._alive = [f"{key}/alive" for key in here]
        self._over = threading.Event()
        self._told, self._announced = "", ""
        self._silent: str | None = None
        self.first_node = "node 0"
        self.start()

    @property
    def is_stopped(self) -> bool:
        """True if a node was told to stop: none starts again."""
        return self._announced.split(" ")[0] == "stop"

    def run(self) -> None:
        """Tell and listen, until `end`."""
        store = self._store
        with suppress(RuntimeError):  # node 0 has ended, or is gone
            while not self._over.wait(POLL_SECONDS):
                store.add(self._alive[self._node], 1)
                if not self._announced:
                    if self._told:
                        store.compare_set(self._failed, "", self._told)
                    self._announced = _read(store, self._failed) or ""
                elif self._silent is None:
                    if self._node == 0:
                        store.set(self._lost, "" if self.is_stopped else self._silent_nodes())
                    self._silent = _read(store, self._lost)

    def raise_announced(self) -> None:
        """Raise NodeFailedError if a failure was announced."""
        if self._announced:
            _, code, host, text = self._announced.split(" ", 3)
            told = f"another node failed: {text}\nits own `accel launch`, on {host}, has the traceback"
            raise NodeFailedError(told, exit_code=int(code))

    def tell(self, failure: LaunchError, *, is_stop: bool = False) -> LaunchError:
        """Announce a failure; return it with the nodes that do not answer, which are its likely cause.

        All nodes end with the exit code of the one that announced its failure first. is_stop: this node was
        told to stop, so that no node starts again.
        """
        first, _, rest = str(failure).partition("\n")
        self._told = f"{'stop' if is_stop else 'fail'} {failure.exit_code} {platform.node() or '?'} {first}"
        deadline = time.monotonic() + LOST_SECONDS + 2 * SPREAD_SECONDS
        while self._silent is None and self.is_alive() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if self._node == 0:
            time.sleep(SPREAD_SECONDS)  # the store may end with this process
        lost = f"{self.first_node} does not answer" if self._silent is None else self._silent
        if not lost:
            return failure
        advice = "check that its machine is running, and that the network reaches it"
        told = "\n".join(filter(None, (f"{first}; {lost}", rest.rstrip("\n"), advice)))
        return LaunchError(told, exit_code=failure.exit_code, rank=failure.rank)

    def end(self) -> None:
        """End the thread: one inside torch's store aborts a process that exits."""
        self._over.set()
        self.join(SPREAD_SECONDS)

    def _silent_nodes(self) -> str:
        """Return which nodes give no sign of life, in words."""
        before = {node: self._store.add(key, 0) for node, key in enumerate(self._alive) if node}
        silent, deadline = list(before), time.monotonic() + LOST_SECONDS
        while silent and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            silent = [node for node in silent if self._store.add(self._alive[node], 0) == before[node]]
        names = [_name(self._store, self._here[node]) for node in silent]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"{shown} {'do' if len(names) > 1 else 'does'} not answer" if names else ""


def _read(store: Any, key: str) -> str | None:
    return str(store.get(key).decode()) if store.check([key]) else None


def _name(store: Any, here: str) -> str:
    """Return what a node has called itself under its key: "node 1 (gpu02)"."""
    return str(store.get(here).decode().rpartition(" ")[0])
