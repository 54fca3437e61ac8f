"""The torchrun launcher: torch's elastic_launch on this node, once per attempt."""

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
from tempfile import TemporaryDirectory
from typing import Any, Final

from accel_core.contract import hooks
from accel_core.contract.config import LaunchConfig
from accel_core.contract.hooks import implements
from accel_core.contract.job import Allocation, Job
from accel_core.distributed.forks import keep_inherited_objects
from accel_core.launch.addresses import interface_towards, rendezvous_address, wait_for_node_0
from accel_core.launch.signals import Signals
from accel_core.launch.worker import guard, note_process
from accel_core.plugins.discovery import discover
from accel_core.plugins.tasks import refuse_lone_task, task_here

NOISY: Final = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
RENDEZVOUS_SECONDS: Final = 900
"""Seconds that nodes wait for each other."""

_inherited: list[BaseException | None] = []
"""In a fork: the notebook's last error. Its traceback holds objects that the fork must not free."""


class TorchrunLauncher:
    """Slot launcher: starts `job.processes_per_node` workers on this machine."""

    def __init__(self, config: object = None, run: object = None) -> None:
        del config, run  # this launcher has no options, and is made before any run

    @implements(hooks.allocation)
    def allocation(self, launch: LaunchConfig) -> Allocation | None:
        """Return None: with torchrun, the user names the machines."""
        del launch
        return None

    @implements(hooks.launch)
    def launch(self, job: Job) -> int:
        """Run `job.argv` in each worker, and return the exit code.

        Raises:
            LaunchError: describes the first failing rank, and has its exit code.
        """
        try:
            _run(job, job.argv[0], job.argv[1:])
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        return 0


def launch_function(function: Callable[..., Any], args: tuple[Any, ...], job: Job) -> Sequence[Any]:
    """Run `function(*args)` in `job.processes_per_node` workers; return each rank's value, in rank order.

    Workers are forked on Linux, so that functions of a notebook can be used, and spawned elsewhere.

    Raises:
        LaunchError: has the traceback of the first failing rank.
    """
    method = "fork" if sys.platform == "linux" else "spawn"
    keep_inherited_objects()  # forks must not free objects that an earlier launch left in this process
    results = _run(job, _call, (function, args), start_method=method)
    pickled = [results[rank] for rank in sorted(results)]  # None: the function called sys.exit(0)
    return [None if data is None else pickle.loads(data) for data in pickled]  # noqa: S301 - our own workers'


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    # A forked worker inherits the launcher's signal handlers.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    note_process()
    _inherited.append(vars(sys).pop("last_value", None))
    try:
        return guard(lambda: pickle.dumps(function(*args)))
    finally:  # handlers of atexit do not run in a child of multiprocessing
        vars(threading)["_shutdown"]()  # wait for threads that the function left, as at the end of a script
        if "accel_core.runtime.exit" in sys.modules:
            sys.modules["accel_core.runtime.exit"].end_runs()


def _run(
    job: Job, entrypoint: Callable[..., Any] | str, args: Sequence[Any], start_method: str = "spawn"
) -> dict[int, Any]:
    """Run workers under torch's agent; return rank -> result."""
    signals = Signals()
    with signals:
        discovery = discover()
        refuse_lone_task(task_here(discovery), discovery, job.nodes)
        place = rendezvous_address(job)
        does_nothing_else = isinstance(entrypoint, str)
        if does_nothing_else:
            gc.disable()  # a collection during the import of torch takes time, and frees nothing
        from accel_core.launch.attempts import run_attempts

        if does_nothing_else:
            gc.freeze()
            gc.enable()
        if "LOGLEVEL" not in os.environ:
            for logger in map(logging.getLogger, NOISY):
                logger.addHandler(logging.NullHandler())
                logger.propagate = False
        wait_for_node_0(job, place, RENDEZVOUS_SECONDS)
        with TemporaryDirectory(prefix="accel-") as folder, _environment(job, *place):
            worker = (entrypoint, args, start_method)
            return run_attempts(job, place, RENDEZVOUS_SECONDS, folder, signals, worker)


@contextmanager
def _environment(job: Job, host: str, port: int) -> Iterator[None]:
    """Set the job's variables in this process, whose environment workers inherit."""
    before = dict(os.environ)
    os.environ.update(job.environment)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.processes_per_node)))
    interface = interface_towards(host, port) if job.nodes > 1 else None
    if interface:  # gloo would take the interface of the host's own name, often a loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if sys.platform == "win32":  # torch's store is built without libuv there
        os.environ.setdefault("USE_LIBUV", "0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
