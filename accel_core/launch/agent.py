"""torch's elastic agent and rendezvous, extended.

Nodes find a free port, say for whom they wait, and announce failures to each other.
"""

from __future__ import annotations

import os
import platform
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from accel_core.distributed.silence import end_silent
from accel_core.errors import LaunchError
from accel_core.launch.failure import AGENT_KILLS_AFTER, first_failure, noted_failures
from accel_core.launch.listener import POLL_SECONDS, STOPPED, Listener
from accel_core.launch.meeting import told_soon
from accel_core.launch.rendezvous import address_towards
from accel_core.launch.worker import WARNING, mark_of

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from accel_core.contract.job import Job

SPREAD_SECONDS: Final = 1.0
"""Time in which every node reads an announcement: ten polls."""
ANNOUNCE_SECONDS: Final = 5.0
"""Time for which a failed node tries to announce it."""
SILENT_SECONDS: Final = 30.0
"""Time for which node 0 may be silent when nodes meet again."""
ENDING_NOTICE: Final = 1.0
"""Seconds that workers have to end before a message says that they have not."""


class StaticRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous: nodes keep their numbers. Port 0 is a free port."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the nodes of an attempt; the first time, wait for all of them."""
        if self._store is None:
            place, others = f"{self.master_addr}:{self.master_port}", range(self.world_size)
            missing = [0] if self.rank else [node for node in others if node != self.rank]
            with _waiting_is_told(self.rank, self.world_size, place, missing):
                if self.rank:
                    _wait_for_node_0(self.master_addr, self.master_port, self.timeout)
                self._store = _store(self.master_addr, self.master_port, self.timeout, serves=self.rank == 0)
                self._wait_for_all(place, missing)
            self.master_port = self._store.port
        return super().next_rendezvous()

    def _wait_for_all(self, place: str, missing: list[int]) -> None:
        """Return once every node is here; keeps `missing` up to date."""
        store: Any = self._store
        node, nodes, seconds = self.rank, self.world_size, self.timeout.total_seconds()
        deadline, token = time.monotonic() + seconds, secrets.token_hex(8)
        if store.compare_set(f"accel/here/{node}", "", token) != token.encode():
            raise LaunchError(
                f"two launchers at {place} say that they are node {node} of {nodes}\n"
                "give each node a --node-rank of its own, from 0; a lost node can rejoin only if all nodes"
                " were started with --min-nodes"
            )
        if store.add("accel/here", 1) == nodes:
            store.set("accel/all", "")
        while not store.check(["accel/all"]):  # torch's own wait logs each time-out
            time.sleep(POLL_SECONDS)
            missing[:] = [other for other in range(nodes) if not store.check([f"accel/here/{other}"])]
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"node {node} of {nodes} waited {seconds:.0f} s at {place} for {_listed(missing)}\n"
                    "start each node with the same command, and with a --node-rank of its own, from 0"
                )


class ElasticRendezvous(DynamicRendezvousHandler):
    """torch's dynamic rendezvous: nodes come and go, and are numbered anew each time."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the nodes of an attempt."""
        self._bootstrap_store_info = None  # torch would keep that of a first node that is gone
        with told_soon("this node waits for others to join"):
            return super().next_rendezvous()

    @property
    def rounds(self) -> int:
        """Number of rendezvous before this one: the same on all nodes."""
        return int(self._state_holder.state.round)


def make_rendezvous(host: str, port: int, job: Job, seconds: int) -> RendezvousHandler:
    """Make the rendezvous of a job's nodes.

    Node 0 serves its store, and a job that lost node 0 ends. The job's variables are set.
    """
    run_id = os.environ.get("ACCEL_RUN_ID", "accel")
    if job.min_nodes is None:
        return StaticRendezvous(host, port, job.node_rank, job.nodes, run_id, seconds)
    timeout = timedelta(seconds=seconds)
    if job.node_rank:
        with told_soon(f"node {job.node_rank} waits for node 0 at {host}:{port}"):
            _wait_for_node_0(host, port, timeout)
    store = _store(host, port, timeout, serves=job.node_rank == 0)
    end_silent(store, SILENT_SECONDS)  # it is asked all the time for nodes that wait
    elastic: ElasticRendezvous = ElasticRendezvous.from_backend(
        run_id,
        store,
        C10dRendezvousBackend(store, run_id),
        job.min_nodes,
        job.nodes,
        local_addr=address_towards(host, port),
        timeout=RendezvousTimeout(join=timeout),
    )
    return elastic


def _waiting_is_told(node: int, nodes: int, place: str, missing: list[int]) -> AbstractContextManager[None]:
    """Show which nodes are missing."""

    def text() -> str:
        return f"node {node} of {nodes} waits for {_listed(missing)} at {place}"

    return told_soon(text) if nodes > 1 else nullcontext()


def _listed(nodes: Sequence[int]) -> str:
    shown = ", ".join(map(str, nodes[:8])) + (", ..." if len(nodes) > 8 else "")
    return f"node{'s' if len(nodes) > 1 else ''} {shown}"


def _wait_for_node_0(host: str, port: int, timeout: timedelta) -> None:
    """Return when node 0 answers. In torch's own wait for it no signal handler runs."""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection((host, port), 10 * POLL_SECONDS).close()
            return
        time.sleep(POLL_SECONDS)
    raise RendezvousConnectionError(f"node 0 did not answer for {timeout.total_seconds():.0f} s")


def _store(host: str, port: int, timeout: timedelta, *, serves: bool) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=serves,
        timeout=timeout,
        multi_tenant=True,  # the workers of this machine use it too
        use_libuv=os.environ.get("USE_LIBUV") != "0",
    )


class Agent(LocalElasticAgent):
    """torch's agent, which restarts together with those of other nodes.

    No agent waits for a node that failed.
    """

    failure: LaunchError | None = None
    """The cause that ended the last attempt, if it failed."""
    failed_elsewhere = False
    """True if another node has that failure, and reports it."""
    _listener: Listener | None = None
    _warned = False

    def pass_on_warnings(self, before: Sequence[int]) -> None:
        """Turn a scheduler's warning into a SIGTERM of the workers.

        The warning alone would end this process. Workers save and end by themselves, in their own time.
        before: those that came until now.
        """
        if hasattr(signal, WARNING) and threading.current_thread() is threading.main_thread():
            signal.signal(getattr(signal, WARNING), self._pass_on)
        self._warned = self._warned or bool(before)  # read last: none comes between

    def _pass_on(self, *_: object) -> None:
        self._warned = True
        for rank, code in self._exit_codes().items():
            if code is None:
                os.kill(self._processes()[rank].pid, signal.SIGTERM)

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        if self._warned:  # while nodes met
            self._pass_on()
        return started

    def _rendezvous(self, worker_group: Any) -> None:
        if self._store is not None:  # a restart, perhaps for the loss of node 0
            end_silent(self._store, SILENT_SECONDS)
        super()._rendezvous(worker_group)
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, ElasticRendezvous):
            # torch counts restarts on the failed node only, but workers go by one count on all nodes.
            self._remaining_restarts = worker_group.spec.max_restarts - handler.rounds
        self.stop_listening()
        node, nodes = worker_group.group_rank, worker_group.group_world_size
        self._listener = Listener(self._store, self._attempt, node, nodes) if nodes > 1 else None

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        left = self._left_early()
        if left is not None or result.is_failed():
            # A process that left without an error was the first to go: the others failed after it.
            notes = getattr(self._pcontext, "error_files", {})
            noted = {worker_group.workers[it.local_rank].global_rank: it for it in noted_failures(notes)}
            failures = {**noted, **result.failures}
            self.failure = (
                first_failure(failures, notes) if left is None else _ended_early(worker_group, left)
            )
            result = RunResult(WorkerState.FAILED, failures=result.failures)
            self.announce(STOPPED if self._warned else self._attempt, self.failure)
            if self._warned:  # workers that start again would hear of no end
                self._remaining_restarts = 0
        elif result.state == WorkerState.HEALTHY and self._another_failed():
            result = RunResult(state=WorkerState.FAILED)
        if result.is_failed():
            self._name_lost_nodes()
        if result.is_failed() and self._remaining_restarts > 0:
            spec, reason = worker_group.spec, str(self.failure).partition("\n")[0]
            attempt = spec.max_restarts - self._remaining_restarts + 1
            sys.stderr.write(f"accel: {reason}; restart {attempt} of {spec.max_restarts}\n")
        return result

    def raise_failure(self) -> None:
        """Raise the cause that ended the last attempt, if it is known."""
        if self.failure is None:
            return
        if self.failed_elsewhere:  # engines end all once one has ended: the other node tells more
            time.sleep(2 * SPREAD_SECONDS)
        raise self.failure

    def _name_lost_nodes(self) -> None:
        """Add to the failure the nodes that do not answer, which are its likely cause."""
        failure, lost = self.failure, self._listener.lost_nodes() if self._listener is not None else ""
        if failure is None or not lost:
            return
        first, _, rest = str(failure).partition("\n")
        text = f"{first}; {lost}\n{rest}".rstrip("\n")
        told = f"{text}\ncheck that its machine is running, and that the network reaches it"
        self.failure = LaunchError(told, exit_code=failure.exit_code, rank=failure.rank)

    def _left_early(self) -> int | None:
        """Return the local rank of a process that ended with code 0 too early.

        torch takes it for the end of the script, and never stops waiting for a function's result.
        """
        context: Any = self._pcontext
        for rank, code in self._exit_codes().items():
            if hasattr(context, "subprocess_handlers"):
                is_unfinished = mark_of(context.error_files[rank]).exists()
            else:
                is_unfinished = rank not in context._return_values
            if code == 0 and is_unfinished:
                return rank
        return None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **options: Any) -> None:
        """End the workers.

        A message names those that take long; a second Ctrl-C kills them.
        """
        notice = threading.Timer(ENDING_NOTICE, self._name_the_living)
        notice.daemon = True
        notice.start()
        try:
            super()._shutdown(death_sig, *more, **options)
        except SignalException as again:  # a second SIGTERM may be the first one, passed on by a shell
            if again.sigval == signal.SIGINT:
                super()._shutdown(getattr(signal, "SIGKILL", signal.SIGTERM), *more, **options)
            raise
        finally:
            notice.cancel()

    def _name_the_living(self) -> None:
        living = [rank for rank, code in self._exit_codes().items() if code is None]
        ranks = [self.get_worker_group().workers[local].global_rank for local in living]
        if ranks:
            names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            wait = f"waiting up to {AGENT_KILLS_AFTER - ENDING_NOTICE:.0f} s for {names} to end"
            sys.stderr.write(f"accel: told to stop; {wait} (another Ctrl-C kills)\n")

    def _exit_codes(self) -> dict[int, int | None]:
        """Exit codes of this machine's workers, by local rank; None for one that runs."""
        processes = self._processes().items()
        return {rank: it.poll() if hasattr(it, "poll") else it.exitcode for rank, it in processes}

    def _processes(self) -> dict[int, Any]:
        context: Any = self._pcontext
        scripts = getattr(context, "subprocess_handlers", {})
        functions = getattr(getattr(context, "_pc", None), "processes", ())
        return {**{rank: handler.proc for rank, handler in scripts.items()}, **dict(enumerate(functions))}

    @property
    def _attempt(self) -> str:
        return f"accel/failed/{self._remaining_restarts}"

    def _another_failed(self) -> bool:
        """Return True if another node failed in this attempt, or was stopped."""
        if self._listener is None or self._listener.heard is None:
            return False
        key, announced = self._listener.heard
        code, host, text = announced.split(" ", 2)
        self.failed_elsewhere = True
        told = f"another node failed: {text}\nits own `accel launch`, on {host}, has the traceback"
        self.failure = LaunchError(told, exit_code=int(code))
        if key == STOPPED:
            self._remaining_restarts = 0
        return True

    def stop_listening(self) -> None:
        """End the listening thread."""
        if self._listener is not None:
            self._listener.end()

    def announce(self, key: str, failure: LaunchError) -> None:
        """Tell the other nodes that this one failed; all exit with its code.

        Gives up after some seconds without node 0.
        """
        group = self.get_worker_group()
        if self._store is None or group.group_world_size == 1:
            return
        first_line = str(failure).partition("\n")[0]
        store, text = self._store, f"{failure.exit_code} {platform.node() or '?'} {first_line}"

        def send() -> None:
            with suppress(RuntimeError):  # node 0 is gone, and with it every node that could listen
                store.set(key, text)

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        sending.join(ANNOUNCE_SECONDS)
        if group.group_rank == 0:
            time.sleep(SPREAD_SECONDS)  # the store may end with this process


def _ended_early(worker_group: Any, local_rank: int) -> LaunchError:
    rank = worker_group.workers[local_rank].global_rank
    return LaunchError(
        f"rank {rank} (local {local_rank}) ended, with exit code 0, before its script or function did\n"
        "look for os._exit(0), or a library that ends the process; sys.exit(0) ends a script well",
        rank=rank,
    )
