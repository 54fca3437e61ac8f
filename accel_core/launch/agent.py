"""torch's elastic agent, with what it lacks: a free port, and failures told to the other nodes."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
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

from accel_core.errors import LaunchError
from accel_core.launch.failure import AGENT_KILLS_AFTER, first_failure
from accel_core.launch.rendezvous import address_towards
from accel_core.launch.worker import mark_of

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from accel_core.contract.job import Job

__all__ = ["Agent", "Gathering", "Meeting", "meet"]

STOPPED: Final = "accel/stopped"
NEWS_TRAVEL: Final = 1.0
"""Seconds; agents look ten times in this."""
LISTEN_SECONDS: Final = 0.1
FIRST_WORD: Final = 3.0
NEXT_WORD: Final = 30.0
"""Seconds after which a node that waits for others says so, first and then again."""
FIRST_PATIENCE: Final = 1.0
"""Seconds that workers have to end before somebody is told that they have not."""
NEWS_PATIENCE: Final = 5.0
"""Seconds that a failed node tries to tell the others."""


class Meeting(StaticTCPRendezvous):
    """torch's, whose nodes keep the numbers they were started with; port 0 is a free one."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Called once an attempt; the nodes come together the first time."""
        if self._store is None:
            with Patience(self.rank, self.world_size, f"{self.master_addr}:{self.master_port}") as patience:
                if self.rank:
                    _await(self.master_addr, self.master_port, self.timeout)
                self._store = _store(self.master_addr, self.master_port, self.timeout, serves=self.rank == 0)
                patience.gather(self._store, self.timeout.total_seconds())
            self.master_port = self._store.port
        return super().next_rendezvous()


class Patience:
    """The wait for the other nodes, told from the third second on: for whom, and where."""

    def __init__(self, node: int, nodes: int, place: str) -> None:
        self.node, self.nodes, self.place = node, nodes, place
        self.missing = [0] if node else [other for other in range(nodes) if other != node]
        self._over = threading.Event()

    def __enter__(self) -> Patience:  # noqa: PYI034 - python 3.10 has no Self
        if self.nodes > 1:
            threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _tell(self) -> None:
        pause = FIRST_WORD
        while not self._over.wait(pause):
            pause = NEXT_WORD
            sys.stderr.write(f"accel: node {self.node} of {self.nodes} waits for {self} at {self.place}\n")

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.missing[:8])) + (", ..." if len(self.missing) > 8 else "")
        return f"node{'s' if len(self.missing) > 1 else ''} {shown}"

    def gather(self, store: TCPStore, seconds: float) -> None:
        """Return once every node is here; LaunchError after that many seconds."""
        deadline = time.monotonic() + seconds
        mine = secrets.token_hex(8).encode()
        if store.compare_set(f"accel/here/{self.node}", "", mine.decode()) != mine:
            raise LaunchError(
                f"two launchers at {self.place} say that they are node {self.node} of {self.nodes}\n"
                "give each node a --node-rank of its own, from 0"
            )
        if store.add("accel/here", 1) == self.nodes:
            store.set("accel/all", "")
        while not store.check(["accel/all"]):  # torch's own wait logs each time that it ends in vain
            time.sleep(LISTEN_SECONDS)
            self.missing = [node for node in range(self.nodes) if not store.check([f"accel/here/{node}"])]
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"node {self.node} of {self.nodes} waited {seconds:.0f} s at {self.place} for {self}\n"
                    "start each node with the same command, and with a --node-rank of its own, from 0"
                )


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
    if job.node_rank:
        _await(host, port, timeout)
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


def _await(host: str, port: int, timeout: timedelta) -> None:
    """Return when the place answers: in torch's own wait for it no handler of a signal runs."""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection((host, port), LISTEN_SECONDS * 10).close()
            return
        time.sleep(LISTEN_SECONDS)
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
    """torch's; those of several nodes restart together, and none waits for a node that failed."""

    failure: LaunchError | None = None
    """Why the last attempt ended, if it failed."""
    _listener: Listener | None = None

    def _rendezvous(self, worker_group: Any) -> None:
        super()._rendezvous(worker_group)
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, Gathering):
            # Only a node that failed has counted it; workers go by one count, on all nodes.
            self._remaining_restarts = worker_group.spec.max_restarts - handler.meetings

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        left = self._left_early()
        if left is not None or result.is_failed():
            # A process that left without a word was the first: the others have noticed.
            self.failure = first_failure(result.failures) if left is None else self._told(worker_group, left)
            result = RunResult(WorkerState.FAILED, failures=result.failures)
            self.tell(self._attempt, str(self.failure).splitlines()[0])
        elif result.state == WorkerState.HEALTHY and self._has_news(worker_group.group_world_size):
            result = RunResult(state=WorkerState.FAILED)
        if result.is_failed() and self._remaining_restarts > 0:
            spec, reason = worker_group.spec, str(self.failure).splitlines()[0]
            attempt = spec.max_restarts - self._remaining_restarts + 1
            sys.stderr.write(f"accel: {reason}; restart {attempt} of {spec.max_restarts}\n")
        return result

    def _left_early(self) -> int | None:
        """The local rank of a process that ended, with code 0, before its script or function; None of none.

        torch takes it for the script's end, and waits for ever for a function's result.
        """
        for rank, code in self._exit_codes().items():
            if code == 0 and self._is_unfinished(rank):
                return rank
        return None

    def _is_unfinished(self, rank: int) -> bool:
        context: Any = self._pcontext
        if hasattr(context, "subprocess_handlers"):
            return mark_of(context.error_files[rank]).exists()
        return rank not in context._return_values

    def _told(self, worker_group: Any, left: int) -> LaunchError:
        rank = worker_group.workers[left].global_rank
        return LaunchError(
            f"rank {rank} (local {left}) ended, with exit code 0, before its script or function did\n"
            "look for os._exit(0), or a library that ends the process; sys.exit(0) ends a script well",
            rank=rank,
        )

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **options: Any) -> None:
        """End the workers. Those that take their time are told of, and a second Ctrl-C kills them."""
        telling = threading.Timer(FIRST_PATIENCE, self._tell_of_the_living)
        telling.daemon = True
        telling.start()
        try:
            super()._shutdown(death_sig, *more, **options)
        except SignalException as again:  # a second SIGTERM may well be the same one, through a shell
            if again.sigval == signal.SIGINT:
                super()._shutdown(getattr(signal, "SIGKILL", signal.SIGTERM), *more, **options)
            raise
        finally:
            telling.cancel()

    def _tell_of_the_living(self) -> None:
        living = [rank for rank, code in self._exit_codes().items() if code is None]
        ranks = [self.get_worker_group().workers[local].global_rank for local in living]
        if ranks:
            names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            wait = f"waiting up to {AGENT_KILLS_AFTER - FIRST_PATIENCE:.0f} s for {names} to end"
            sys.stderr.write(f"accel: told to stop; {wait} (another Ctrl-C kills)\n")

    def _exit_codes(self) -> dict[int, int | None]:
        """Of this machine's workers, by local rank; None while they run."""
        context: Any = self._pcontext
        scripts = getattr(context, "subprocess_handlers", {})
        functions = getattr(getattr(context, "_pc", None), "processes", ())
        return {
            **{rank: each.proc.poll() for rank, each in scripts.items()},
            **{rank: each.exitcode for rank, each in enumerate(functions)},
        }

    @property
    def _attempt(self) -> str:
        return f"accel/failed/{self._remaining_restarts}"

    def _has_news(self, nodes: int) -> bool:
        """Whether another node failed in this attempt, or was stopped."""
        if nodes == 1 or self._store is None:
            return False
        if self._listener is None or self._listener.attempt != self._attempt:
            self.stop_listening()
            self._listener = Listener(self._store, self._attempt)
        if self._listener.news is None:
            return False
        key, news = self._listener.news
        self.failure = LaunchError(f"another node failed: {news}\nits own `accel launch` has the traceback")
        if key == STOPPED:
            self._remaining_restarts = 0
        return True

    def stop_listening(self) -> None:
        """End the thread that looks for news: one inside torch's store aborts a process that exits."""
        if self._listener is not None:
            self._listener.end()

    def tell(self, key: str, news: str) -> None:
        """Let the other nodes know that this one failed; for some seconds only, if node 0 is cut off."""
        group = self.get_worker_group()
        if self._store is None or group.group_world_size == 1:
            return
        store = self._store

        def send() -> None:
            with suppress(RuntimeError):  # node 0 is gone, and with it every node that could be told
                store.set(key, news)

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        sending.join(NEWS_PATIENCE)
        if group.group_rank == 0:
            time.sleep(NEWS_TRAVEL)  # the store may end with this process


class Listener:
    """Looks for the news of one attempt, beside the loop that watches the workers.

    A look into a store on a machine that is cut off lasts as long as the network stack waits: 15 minutes.
    """

    def __init__(self, store: Any, attempt: str) -> None:
        self.attempt = attempt
        self.news: tuple[str, str] | None = None
        self.over = False
        self._thread = threading.Thread(target=self._listen, args=(store.clone(),), daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.over = True
        self._thread.join(NEWS_TRAVEL)

    def _listen(self, store: Any) -> None:
        with suppress(RuntimeError):  # node 0 is through and gone, which is no reason to stop
            while self.news is None and not self.over:
                key = next((key for key in (STOPPED, self.attempt) if store.check([key])), None)
                if key is not None:
                    self.news = key, store.get(key).decode()
                time.sleep(LISTEN_SECONDS)
