"""The launcher of one node: torch's own elastic agent, quieted, its failures told once."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from accel_core import hookspecs as hooks
from accel_core.errors import LaunchError
from accel_core.hookspecs import Job, implements
from accel_core.native.failure import Failure, first_failure
from accel_core.worker import guard

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

__all__ = ["TorchrunLauncher", "refuse_lonely_tasks"]

LOCAL: Final = "127.0.0.1"
NOISY: Final = ("torch.distributed.elastic", "torch.multiprocessing", "torchelastic-events-null")
PATIENCE: Final = 900.0
"""Seconds that nodes wait for each other."""
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
    meet = _meeting_point(job)  # first of all: it needs no torch to refuse
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with TemporaryDirectory(prefix="accel-") as notes, _environment(job), _quiet_agent(), _signals(job):
        try:
            returned: dict[int, Any] = elastic_launch(_config(job, meet, notes, start_method), entrypoint)(
                *args
            )
        except ChildFailedError as error:
            return first_failure(error.failures)
        except SignalException as error:
            return 128 + error.sigval
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except (RuntimeError, TimeoutError) as error:  # torch's DistError, RendezvousError are of these
            raise LaunchError(
                f"the {job.nodes} nodes did not come together at {job.rendezvous}: {error}\n"
                "start the same command on each node with its own --node-rank, and check --rendezvous"
            ) from error
    return returned


def _config(job: Job, meet: Mapping[str, Any], notes: str, start_method: str) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=job.nodes,
        max_nodes=job.nodes,
        nproc_per_node=job.processes_per_node,
        run_id=os.environ.get("ACCEL_RUN_ID", "accel"),
        max_restarts=job.max_restarts,
        start_method=start_method,
        logs_specs=_notes(notes, job.max_restarts),
        **meet,
    )


def _notes(folder: str, restarts: int) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    class Notes(DefaultLogsSpecs):
        """Where workers note their failures; tells of the last attempt's when the next one starts."""

        last: LogsDest | None = None

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            if self.last is not None:
                attempt = envs[0]["TORCHELASTIC_RESTART_COUNT"]
                reason = _earliest_note(self.last.error_files.values())
                sys.stderr.write(f"accel: a worker failed{reason}; restart {attempt} of {restarts}\n")
            self.last = super().reify(envs)
            return self.last

    return Notes(log_dir=folder)


def _earliest_note(paths: Iterable[str]) -> str:
    found = []
    for path in map(Path, paths):
        if path.exists():
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            found.append((message["extraInfo"]["time"], message["message"].splitlines()[0]))
    return f" ({min(found)[1]})" if found else ""


def _meeting_point(job: Job) -> dict[str, Any]:
    """The rendezvous arguments of torch's LaunchConfig, checked as far as one node can."""
    if job.rendezvous is None and job.nodes == 1:
        return _c10d(f"{LOCAL}:0", LOCAL, is_host=True)
    if job.rendezvous is None:
        raise LaunchError(
            f"{job.nodes} nodes were asked for, and no place to meet\n"
            "add --rendezvous HOST:PORT, an address of node 0 and a free port there, on each node"
        )
    host, port = _split(job.rendezvous)
    endpoint = f"{host if job.nodes > 1 else LOCAL}:{port}"
    if job.node_rank == 0:
        _refuse_taken_port(endpoint)
    else:
        _await_host(endpoint)
    if job.max_restarts:
        return _c10d(endpoint, _address_towards(endpoint), is_host=job.node_rank == 0)
    # Without restarts the static kind will do, and keeps --node-rank; c10d sorts nodes by address.
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": endpoint,
        "rdzv_configs": {"rank": job.node_rank, "timeout": int(PATIENCE)},
    }


def _c10d(endpoint: str, address: str, *, is_host: bool) -> dict[str, Any]:
    # Left to itself torch guesses is_host from host names, and two nodes wait for a third party.
    return {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": endpoint,
        "rdzv_configs": {"is_host": is_host, "timeout": int(PATIENCE)},
        "local_addr": address,
    }


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise LaunchError(
            f"--rendezvous {endpoint!r} is not HOST:PORT\nfor example --rendezvous 10.0.0.1:29500"
        )
    return host, int(port)


def _refuse_taken_port(endpoint: str) -> None:
    port = _split(endpoint)[1]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} of this machine cannot be used: {os.strerror(error.errno or 0).lower()}\n"
                f"take another, such as --rendezvous {_split(endpoint)[0]}:{port + 1}, on every node"
            ) from error


def _await_host(endpoint: str) -> None:
    # In Python, because waiting inside torch's store cannot be interrupted.
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(_split(endpoint), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"node 0 did not answer at {endpoint} for {PATIENCE:g} s: {error}\n"
                    "start the same command there with --node-rank 0, or correct --rendezvous"
                ) from error
            time.sleep(0.2)
        else:
            return


def _address_towards(endpoint: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_split(endpoint))
        return str(probe.getsockname()[0])


@contextmanager
def _environment(job: Job) -> Iterator[None]:
    """The job's variables in this process, whose environment the agent's workers inherit."""
    before = dict(os.environ)
    os.environ.update(job.environment)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.processes_per_node)))
    if job.nodes > 1 and job.rendezvous and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo would take the interface of the host's own name, often a loopback.
        interface = _interface_of(_address_towards(job.rendezvous))
        os.environ.update({"GLOO_SOCKET_IFNAME": interface} if interface else {})
    if _store_lacks_libuv():
        os.environ.setdefault("USE_LIBUV", "0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _interface_of(address: str) -> str | None:
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:  # SIOCGIFADDR; interfaces without an IPv4 address have no answer
                found = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))[20:24]
            except OSError:
                continue
            if socket.inet_ntoa(found) == address:
                return name
    return None


def _store_lacks_libuv() -> bool:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError as error:
        return "libuv" in str(error)
    return False


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's log lines from the terminal, unless LOGLEVEL asks for them."""
    silence = logging.NullHandler()
    noisy = [logging.getLogger(name) for name in NOISY]
    propagated = [logger.propagate for logger in noisy]
    for logger in noisy:
        logger.propagate = "LOGLEVEL" in os.environ
        logger.addHandler(silence)
    try:
        yield
    finally:
        for logger, propagate in zip(noisy, propagated, strict=True):
            logger.propagate = propagate
            logger.removeHandler(silence)


@contextmanager
def _signals(job: Job) -> Iterator[None]:
    """Undo the handlers that the agent installs; let Ctrl-C end the wait for other nodes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [
        getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
    ]
    before = [signal.getsignal(number) for number in signals]
    if job.nodes > 1:
        # Inside torch's store no Python handler runs; nothing is lost before the workers exist.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
