"""The torchrun launcher: torch's elastic agent on this node."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from accel_core.config.sources import WORKER_CONFIG_VARIABLE
from accel_core.contract import hooks
from accel_core.contract.config import LaunchConfig
from accel_core.contract.hooks import implements
from accel_core.contract.job import Allocation, Job
from accel_core.errors import LaunchError
from accel_core.launch.rendezvous import interface_towards, rendezvous_address
from accel_core.launch.worker import WARNING, guard
from accel_core.plugins.discovery import discover
from accel_core.plugins.tasks import refuse_lone_task, task_here

NOISY: Final = ("torch.distributed.elastic", "torch.multiprocessing", "torchelastic-events-null")
RENDEZVOUS_SECONDS: Final = 900
"""Seconds that nodes wait for each other."""

_inherited: list[BaseException | None] = []
"""In a fork: the last error of the notebook.

Its traceback holds objects that the fork may not free.
"""


class TorchrunLauncher:
    """Slot launcher: `job.processes_per_node` workers of this machine."""

    def __init__(self, config: object = None, run: object = None) -> None:
        del config, run  # it has no options, and lives before any run

    @implements(hooks.allocation)
    def allocation(self, launch: LaunchConfig) -> Allocation | None:
        """Return None: a user names the machines of torchrun."""
        del launch
        return None

    @implements(hooks.launch)
    def launch(self, job: Job) -> int:
        """Run `job.argv` in each worker, and return the exit code.

        A LaunchError describes the first failing rank, and has its code.
        """
        try:
            _run_agent(job, job.argv[0], job.argv[1:])
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        return 0

    @implements(hooks.launch_function)
    def launch_function(self, function: Callable[..., Any], args: tuple[Any, ...], job: Job) -> Sequence[Any]:
        """Fork on Linux, so that functions of a notebook will do; elsewhere spawn."""
        method = "fork" if sys.platform == "linux" else "spawn"
        results = _run_agent(job, _call, (function, args), start_method=method)
        pickled = [results[rank] for rank in sorted(results)]  # None: the function left by sys.exit(0)
        return [None if data is None else pickle.loads(data) for data in pickled]  # noqa: S301 - our own workers'


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker inherits the agent's handler
    # What an earlier launch left is the notebook's to free: in a fork, torch's objects crash when they go.
    gc.freeze()
    _inherited.append(vars(sys).pop("last_value", None))
    try:
        return guard(lambda: pickle.dumps(function(*args)))
    finally:  # handlers of atexit do not run in a child of multiprocessing
        vars(threading)["_shutdown"]()  # a thread that the function left is waited for, as in a script
        if "accel_core.runtime.exit" in sys.modules:
            sys.modules["accel_core.runtime.exit"].end_runs()


@contextmanager
def _signals() -> Iterator[None]:
    """Undo the signal handlers that the agent installs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", WARNING)
    before = {number: signal.getsignal(number) for number in signal.Signals if number.name in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _importing(*, for_good: bool) -> Iterator[None]:
    """Keep the garbage collector from searching what is imported inside.

    It finds nothing, and with torch it takes a third of the time of a launch of little work, most of that as
    the process ends. for_good: this process launches and ends, so that no later search looks there either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if for_good:
            gc.freeze()
    finally:
        if enabled:
            gc.enable()


def _noted_warnings() -> list[int]:
    """Return a list for warnings, which else would end this process."""
    noted: list[int] = []
    if hasattr(signal, WARNING) and threading.current_thread() is threading.main_thread():
        signal.signal(getattr(signal, WARNING), lambda number, _: noted.append(number))
    return noted


@_signals()
def _run_agent(
    job: Job, entrypoint: Callable[..., Any] | str, args: Sequence[Any], start_method: str = "spawn"
) -> dict[int, Any]:
    """Run workers under torch's agent; return the result of each by rank.

    Raises LaunchError for a failure. A signal that stops the agent ends this process as signals do.
    """
    warnings = _noted_warnings()  # before torch is imported
    discovery = discover()
    refuse_lone_task(task_here(discovery), discovery, job.nodes)  # it needs no torch to refuse
    host, port = rendezvous_address(job, RENDEZVOUS_SECONDS)
    with _importing(for_good=isinstance(entrypoint, str) and "torch" not in sys.modules):
        from torch.distributed import DistError
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.rendezvous import RendezvousError

        from accel_core.launch.agent import Agent, make_rendezvous
        from accel_core.launch.listener import STOPPED
        from accel_core.launch.output import WorkerLogs

    _quiet_agent()
    # Beside the workers' config, if any: a signal removes one folder.
    beside = Path(config).parent if (config := job.environment.get(WORKER_CONFIG_VARIABLE)) else None
    with TemporaryDirectory(prefix="accel-", dir=beside) as notes, _environment(job, host, port):
        try:
            spec = WorkerSpec(
                role="worker",
                local_world_size=job.processes_per_node,
                rdzv_handler=make_rendezvous(host, port, job, RENDEZVOUS_SECONDS),
                entrypoint=entrypoint,
                args=tuple(args),
                max_restarts=job.max_restarts,
                monitor_interval=0.1,
            )
            logs = WorkerLogs(notes, job)
            agent = Agent(spec, logs, start_method=start_method)
            agent.pass_on_warnings(warnings)
            try:
                result = agent.run()
            finally:
                agent.stop_listening()
                logs.end()
        except SignalException as stop:
            agent.announce(STOPPED, LaunchError(f"it was stopped by signal {stop.sigval}"))
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            sys.exit(128 + stop.sigval)
        except (DistError, RendezvousError) as error:
            raise _not_met(job, f"{host}:{port}", error) from error
        if result.is_failed():
            agent.raise_failure()
        return dict(result.return_values)


def _not_met(job: Job, place: str, error: Exception) -> LaunchError:
    cause = str(error).partition("\n")[0]
    return LaunchError(
        f"node {job.node_rank} of {job.nodes} could not meet the others at {place}: {cause}\n"
        "check --rendezvous (an address of node 0, a port that is free there), and that each node "
        "was started, with its own --node-rank"
    )


@contextmanager
def _environment(job: Job, host: str, port: int) -> Iterator[None]:
    """Set the job's variables in this process, whose environment workers inherit."""
    before = dict(os.environ)
    os.environ.update(job.environment)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.processes_per_node)))
    interface = interface_towards(host, port) if job.nodes > 1 else None
    if interface:  # gloo would take that of the host's own name, often a loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if sys.platform == "win32":  # where torch's store is built without it
        os.environ.setdefault("USE_LIBUV", "0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _quiet_agent() -> None:
    """Keep the agent's log lines from the terminal, unless LOGLEVEL asks for them."""
    if "LOGLEVEL" not in os.environ:
        for logger in map(logging.getLogger, NOISY):
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
