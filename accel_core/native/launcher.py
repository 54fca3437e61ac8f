"""The launcher of one node: torch's own elastic agent, quieted, its failures told once."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, Final

from accel_core import hookspecs as hooks
from accel_core.errors import LaunchError
from accel_core.hookspecs import Job, implements
from accel_core.native.failure import Failure, earliest_note, first_failure
from accel_core.native.meeting import LOCAL, interface_towards, meeting_point
from accel_core.worker import guard

__all__ = ["TorchrunLauncher", "refuse_lonely_tasks"]

NOISY: Final = ("torch.distributed.elastic", "torch.multiprocessing", "torchelastic-events-null")
TASK_COUNTS: Final = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def refuse_lonely_tasks(environment: Mapping[str, str]) -> None:
    """Refuse to be one of several tasks of a scheduler that know nothing of each other.

    Raises:
        LaunchError: a scheduler started several tasks, and torchrun's variables are not set.
    """
    if "WORLD_SIZE" in environment:
        return
    found = next((name for name in TASK_COUNTS if environment.get(name)), None)
    if found and environment[found].isdecimal() and int(environment[found]) > 1:
        raise LaunchError(
            f"the scheduler started {environment[found]} tasks ({found}), and each would train alone: "
            "WORLD_SIZE is not set\n"
            "start one task a node, running `accel launch --nodes N --node-rank I --rendezvous HOST:PORT`; "
            "or, if training alone is meant, set RANK=0 WORLD_SIZE=1"
        )


class TorchrunLauncher:
    """Slot launcher: `job.processes_per_node` workers of this machine."""

    def __init__(self, config: object = None, run: object = None) -> None:
        del config, run  # it has no options, and lives before any run

    @implements(hooks.launch)
    def launch(self, job: Job) -> int:
        """Run `job.argv` in each worker; 128 + n after a signal, else the first failing rank's code."""
        outcome = _run_agent(job, job.argv[0], job.argv[1:])
        if isinstance(outcome, Failure):
            sys.stderr.write(f"{outcome.report}\n")
            return outcome.exit_code
        return outcome if isinstance(outcome, int) else 0

    @implements(hooks.launch_function)
    def launch_function(self, function: Callable[..., Any], args: tuple[Any, ...], job: Job) -> Sequence[Any]:
        """Fork on Linux, so that functions of a notebook will do; elsewhere spawn."""
        outcome = _run_agent(job, _call, (function, args), start_method=_start_method(function))
        if isinstance(outcome, Failure):
            raise LaunchError(outcome.report, exit_code=outcome.exit_code, rank=outcome.rank)
        if isinstance(outcome, int):
            raise KeyboardInterrupt
        return [pickle.loads(outcome[rank]) for rank in sorted(outcome)]  # noqa: S301  # our own workers'


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker inherits the agent's handler
    return guard(lambda: pickle.dumps(function(*args)))


def _start_method(function: Callable[..., Any]) -> str:
    if sys.platform == "linux":
        _refuse_used_device()
        return "fork"
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"{function!r} cannot be handed to new processes: {error}\n"
            "put it into a module (a .py file) and import it"
        ) from error
    return "spawn"


def _refuse_used_device() -> None:
    import torch

    if not torch.accelerator.is_available():
        return
    device = torch.accelerator.current_accelerator()
    in_use = getattr(torch.get_device_module(device), "is_initialized", lambda: False)
    if in_use():
        raise LaunchError(
            f"this process already uses the {device} device, which no forked worker can use after it\n"
            "restart the notebook; make the Accelerator and all tensors inside the launched function"
        )


# -- the agent -----------------------------------------------------------------------------------


def _run_agent(
    job: Job, entrypoint: Callable[..., Any] | str, args: Sequence[Any], start_method: str = "spawn"
) -> dict[int, Any] | Failure | int:
    """What each rank returned, or the first failure, or 128 + the signal that stopped the agent."""
    endpoint = meeting_point(job)  # first of all: it needs no torch to refuse
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SignalException

    from accel_core.native.rendezvous import FixedRendezvous, rendezvous

    _quiet_agent()
    with TemporaryDirectory(prefix="accel-") as notes, _environment(job), _signals(job):
        handler = rendezvous(job, endpoint, os.environ.get("ACCEL_RUN_ID", "accel"))
        tell = handler.tell if isinstance(handler, FixedRendezvous) else lambda news: None
        spec = WorkerSpec(
            role="worker",
            local_world_size=job.processes_per_node,
            rdzv_handler=handler,
            entrypoint=entrypoint,
            args=tuple(args),
            max_restarts=job.max_restarts,
            monitor_interval=0.1,
        )
        agent = LocalElasticAgent(spec, _notes(notes, job.max_restarts), start_method=start_method)
        try:
            result = agent.run()
        except (SignalException, KeyboardInterrupt) as error:
            number = int(getattr(error, "sigval", signal.SIGINT))
            tell(f"it was stopped by signal {number}")
            return 128 + number
        except (RuntimeError, TimeoutError) as error:  # torch's DistError, RendezvousError are of these
            if job.nodes == 1:
                raise
            raise LaunchError(
                f"the {job.nodes} nodes did not come together at {job.rendezvous}: {error}\n"
                "start the same command on each node with its own --node-rank, and check --rendezvous"
            ) from error
        if result.is_failed():
            failure = first_failure(result.failures)
            tell(failure.headline)
            return failure
        return dict(result.return_values)


def _notes(folder: str, restarts: int) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    class Notes(DefaultLogsSpecs):
        """Where workers note their failures; tells of the last attempt's when the next one starts."""

        last: LogsDest | None = None

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            if self.last is not None:
                attempt = envs[0]["TORCHELASTIC_RESTART_COUNT"]
                reason = earliest_note(self.last.error_files.values())
                sys.stderr.write(f"accel: a worker failed{reason}; restart {attempt} of {restarts}\n")
            self.last = super().reify(envs)
            return self.last

    return Notes(log_dir=folder)


@contextmanager
def _environment(job: Job) -> Iterator[None]:
    """The job's variables in this process, whose environment the agent's workers inherit."""
    before = dict(os.environ)
    os.environ.update(job.environment)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.processes_per_node)))
    interface = interface_towards(job.rendezvous) if job.nodes > 1 and job.rendezvous else None
    if interface:  # gloo would take that of the host's own name, often a loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if _store_lacks_libuv():
        os.environ.setdefault("USE_LIBUV", "0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _store_lacks_libuv() -> bool:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError as error:
        return "libuv" in str(error)
    return False


def _quiet_agent() -> None:
    """Keep the agent's log lines from the terminal, unless LOGLEVEL asks for them."""
    if "LOGLEVEL" not in os.environ:
        for logger in map(logging.getLogger, NOISY):
            logger.addHandler(logging.NullHandler())
            logger.propagate = False


@contextmanager
def _signals(job: Job) -> Iterator[None]:
    """Undo the handlers that the agent installs; let Ctrl-C end the wait for other nodes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = {getattr(signal, name, signal.SIGTERM) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")}
    before = {number: signal.getsignal(number) for number in numbers}
    if job.nodes > 1:
        # Inside torch's store no Python handler runs; nothing is lost before the workers exist.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
