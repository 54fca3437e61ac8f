"""Run a function in a world of clean processes, with a launcher's variables.

Processes are forked from a server that has imported torch and core and done nothing else, so each
starts in some 20 ms and knows nothing of the one before: no process group, no renamed device, no
seeded generator.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import importlib.util
import math
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final, TypeVar

from attrs import field, frozen

from accel_testing.patience import patience

__all__ = ["ProcessError", "forking", "reserved_port", "run_processes", "share_server"]

R = TypeVar("R")

GRACE_SECONDS: Final = 2.0
"""The time for other ranks after a failure: they wait in a collective."""
OUTPUT_LINES: Final = 40
PRELOADED: Final = (
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "yaml",
    "accel_testing.preload",
    "accel_core.checkpoint.weights",
    "accel_core.defaults.device",
    "accel_core.defaults.precision",
)
"""Imports of nearly every task; torch's optimizers alone load two, for 2 s."""
PRELOAD_VARIABLE: Final = "ACCEL_TEST_PRELOAD"
"""Variable that names further imports of nearly every task, joined by commas.

It is for a vendor's library that takes seconds to import, and starts nothing when imported. Where the kit
simulates a device it is not read: libraries that look for devices would find the stand-in first.
"""
_STARTING: Final = threading.Lock()
_preloaded: list[str] = []
"""The value of that variable as the server was started; empty while there is none."""
_NO_VARIABLES: Final[Mapping[str, str | None]] = MappingProxyType({})


class ProcessError(AssertionError):
    """A rank raised, died, or did not return in time.

    Attributes:
        rank: the first that failed.
        kind: the exception's class name, `exit CODE` for a process that died, or `timeout`.
        text: its traceback, or its stack where it hung.
        output: what it printed, the last lines of it.
    """

    def __init__(self, message: str, *, rank: int, kind: str, text: str, output: str) -> None:
        super().__init__(message)
        self.rank, self.kind, self.text, self.output = rank, kind, text, output


def run_processes(
    function: Callable[..., R],
    *args: Any,
    world: int = 2,
    environment: Mapping[str, str | None] = _NO_VARIABLES,
    timeout: float = 180.0,
) -> list[R]:
    """Call `function(*args)` in `world` new processes, and list the results.

    `function` is a function of a module, arguments and results can be pickled. Each process has this
    one's environment, search path, directory and warning filters, besides the variables that torchrun
    sets, and `environment` (None unsets). `timeout` is multiplied by the machine's patience.

    Raises:
        ProcessError: with the traceback of the first rank that failed, or the stack of one that hung.
    """
    timeout = patience(timeout)
    with _STARTING:  # a variable is another one meanwhile, which a task of another thread is not to have
        _context()
        task = _Task.of(function, args, seconds=math.ceil(timeout) + 5)
    with TemporaryDirectory(prefix="accel-processes-") as folder, reserved_port() as port:
        shared = _rendezvous(world, port)
        workers: list[_Worker] = []
        try:
            for rank in range(world):
                variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(environment)
                workers.append(_Worker.start(task, rank, variables, Path(folder, f"rank{rank}")))
            return _collect(workers, timeout)
        finally:
            for worker in workers:
                worker.stop()


def forking(preload: str | None = None) -> Any:
    """Return the context of multiprocessing whose processes have torch loaded; None where none is forked.

    preload: what they are to have loaded besides, as PRELOAD_VARIABLE has it. None is returned if the server
    has loaded something else, or would have to be started with it: its processes are those of other tests.
    """
    with _STARTING:
        if sys.platform != "linux" or (preload and not _preloaded):
            return None
        context = _context()
        return context if preload in (None, _preloaded[0]) else None


def share_server() -> None:
    """Let this process, which the server has forked, fork its own from the same server.

    Python means children to do so, and yet starts a server for each of them: it knows a server by the number
    of its process, which children are not told.
    """
    from multiprocessing.forkserver import _forkserver

    _preloaded.append(os.environ.get(PRELOAD_VARIABLE, ""))
    forkserver.ensure_running = _forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


def _rendezvous(world: int, port: int) -> dict[str, str | None]:
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def reserved_port() -> Iterator[int]:
    """Give a free TCP port of 127.0.0.1, which no other harness takes meanwhile."""
    # Below the ephemeral range, where no outgoing connection can take it before rank 0 listens.
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        # The UDP port of the same number is the lock between harnesses: rank 0 is to have the TCP port.
        with socket.socket() as probe, socket.socket(type=socket.SOCK_DGRAM) as lock:
            try:
                lock.bind(("127.0.0.1", port))
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            probe.close()
            yield port
            return
    raise RuntimeError("found no free port of 127.0.0.1 between 20000 and 32000")


# -- in this process -----------------------------------------------------------------------------


@frozen
class _Task:
    module: str
    qualname: str
    arguments: bytes
    seconds: int
    files: Mapping[str, str]
    """Modules that no search path knows under their names -> their files."""
    environment: Mapping[str, str] = field(factory=lambda: dict(os.environ))
    path: Sequence[str] = field(factory=lambda: list(sys.path))
    directory: str = field(factory=os.getcwd)
    filters: Sequence[Any] = field(factory=lambda: [each for each in warnings.filters if _light(each[2])])

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any], *, seconds: int) -> _Task:
        return cls(
            function.__module__, function.__qualname__, pickle.dumps(args), seconds, _test_files(function)
        )


def _test_files(function: Callable[..., Any]) -> dict[str, str]:
    # Test runners import files under names of folders, whose packages they make up: those have no file.
    made_up = {name for name, module in sys.modules.items() if getattr(module, "__file__", None) is None}
    wanted = {
        name: getattr(module, "__file__", None)
        for name, module in sys.modules.items()
        if name == function.__module__ or name.partition(".")[0] in made_up
    }
    return {name: file for name, file in wanted.items() if file and name != "__main__"}


@frozen
class _TestFiles(MetaPathFinder):
    """Finds modules by a table of their files."""

    files: Mapping[str, str]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self.files:
            return importlib.util.spec_from_file_location(name, self.files[name])
        if any(module.startswith(f"{name}.") for module in self.files):
            return ModuleSpec(name, None, is_package=True)
        return None


def _light(category: Any) -> bool:
    # Categories of test runners would make each worker import the runner.
    return category.__module__.partition(".")[0] in ("builtins", "torch", "accel_core")


@frozen
class _Worker:
    rank: int
    process: BaseProcess
    reports: Connection
    output: Path

    @classmethod
    def start(cls, task: _Task, rank: int, variables: Mapping[str, str | None], output: Path) -> _Worker:
        context = _context()
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(task, dict(variables), str(output), theirs))
        try:
            process.start()
        except EOFError:
            raise RuntimeError(
                "the process that workers are forked from has ended: an import failed, see above\n"
                f"it imports {', '.join(PRELOADED)}, and what {PRELOAD_VARIABLE} names:"
                f" {os.environ.get(PRELOAD_VARIABLE, 'nothing')}"
            ) from None
        theirs.close()
        return cls(rank, process, ours, output)

    def receive(self) -> tuple[bool, Any]:
        """Return (returned, its value) or (False, (when, kind, traceback))."""
        try:
            returned, payload = pickle.loads(self.reports.recv_bytes())  # noqa: S301 - of our own worker
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            # The others hear of a death before this process does, and some abort for want of a peer.
            when = math.inf if code == -signal.SIGABRT else -math.inf
            return False, (when, f"exit {code}", "it died without a traceback\n")
        return returned, payload

    def where(self) -> str:
        """Make it write the stack of its threads, and read that."""
        if self.process.pid is not None and hasattr(signal, "SIGUSR1"):
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(0.5)
        return self.tail()

    def tail(self) -> str:
        """Return the last lines of what it wrote."""
        if not self.output.exists():
            return ""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-OUTPUT_LINES:])

    def stop(self) -> None:
        """Leave no process behind; one that has reported gets a moment to end by itself."""
        self.process.join(GRACE_SECONDS if self.reports.closed else 0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.reports.close()
        self.process.close()


@cache
def _context() -> Any:
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Else the server would find what is under test in its directory first, a checkout for instance.
    safe = sys.version_info >= (3, 11)
    preload = os.environ.get(PRELOAD_VARIABLE, "")
    named = [name for name in preload.split(",") if name]
    # multiprocessing has each process run the runner's script again, but for its last line: 0.1 s.
    named += [name for name in ("pytest",) if name in sys.modules]
    preloaded = [name for name in PRELOADED if safe or name.startswith("torch")]
    context.set_forkserver_preload([*preloaded, *named])
    # OpenMP reads its variable when torch is loaded: that of a worker comes too late.
    with _variable("PYTHONSAFEPATH", "1"), _variable("OMP_NUM_THREADS", "1"):
        forkserver.ensure_running()
    _preloaded[:] = _preloaded or [preload]
    return context


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _collect(workers: Sequence[_Worker], timeout: float) -> list[Any]:
    pending = {worker.reports: worker for worker in workers}
    results: dict[int, Any] = {}
    failed: list[tuple[float, _Worker, str, str]] = []
    deadline = time.monotonic() + timeout
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for worker in [pending.pop(reports) for reports in list(pending) if reports in ready]:
            returned, payload = worker.receive()
            worker.reports.close()
            if returned:
                results[worker.rank] = payload
            else:
                when, kind, text = payload
                failed.append((when, worker, kind, text))
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failed:
        # A rank that fails because of another may report first.
        _, worker, kind, text = min(failed, key=lambda each: each[0])
        raise _failure(worker, kind, text, f"rank {worker.rank} of {len(workers)} failed")
    if pending:
        slow = sorted(worker.rank for worker in pending.values())
        worker = next(iter(pending.values()))
        what = f"ranks {slow} of {len(workers)} had not returned after {timeout:g} s"
        raise _failure(worker, "timeout", worker.where(), f"{what}; rank {worker.rank} is at")
    return [results[worker.rank] for worker in workers]


def _failure(worker: _Worker, kind: str, text: str, what: str) -> ProcessError:
    output = worker.tail()
    printed = f"it printed:\n{output}" if output and output != text else ""
    return ProcessError(f"{what}\n{text}{printed}", rank=worker.rank, kind=kind, text=text, output=output)


# -- in the worker -------------------------------------------------------------------------------


def _work(task: _Task, variables: Mapping[str, str | None], output: str, reports: Connection) -> None:
    _settle(task, variables, output)
    try:
        function = _find(task)
        arguments = pickle.loads(task.arguments)  # noqa: S301 - of our own caller
        payload = pickle.dumps((True, function(*arguments)))
    except BaseException as error:  # whatever it is, SystemExit too, the caller has to see it
        told = time.monotonic(), type(error).__name__, traceback.format_exc()
        payload = pickle.dumps((False, told))
    atexit._run_exitfuncs()  # a forked process skips them, one that a launcher starts does not
    sys.stdout.flush()
    reports.send_bytes(payload)
    reports.close()


def _settle(task: _Task, variables: Mapping[str, str | None], output: str) -> None:
    if hasattr(signal, "alarm"):  # should the caller be killed, no worker outlives its time
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(task.seconds)
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    os.environ.clear()
    os.environ.update(task.environment)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.path[:] = task.path
    sys.meta_path.append(_TestFiles(task.files))
    os.chdir(task.directory)
    warnings.filters[:] = task.filters  # type: ignore[index]


def _find(task: _Task) -> Any:
    found: Any = importlib.import_module(task.module)
    for name in task.qualname.split("."):
        found = getattr(found, name)
    return found
