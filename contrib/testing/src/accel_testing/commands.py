"""Run the command `accel` in a process of its own, forked where torch is loaded already.

A forked command has its own standard streams, environment, working folder, arguments and import path. It
has not imported anew what the server of `accel_testing.processes` has: tests of import times, of signals,
and of what Python itself does at its start or end execute a fresh interpreter.
"""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from accel_testing.patience import patience
from accel_testing.processes import forking

__all__ = ["ACCEL", "clean_environment", "fork_command", "run_accel", "run_command", "start_command"]

ACCEL: Final = str(Path(sys.executable).with_name("accel"))
"""The console script of this environment."""
NOT_INHERITED: Final = (
    *("ACCEL", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC"),
    *("SLURM", "PMI", "OMPI", "MV2", "JSM", "FLUX", "PALS"),
)
KEPT: Final = ("ACCEL_TEST_",)


def clean_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's variables without those of a run or an engine, and `given`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(KEPT) or not name.startswith(NOT_INHERITED)
    }
    return {**kept, "OMP_NUM_THREADS": "1", **(given or {})}


def run_command(
    *arguments: Any, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Call `subprocess.run` with a deadline that this machine can keep."""
    limit = None if timeout is None else patience(timeout)
    return subprocess.run(*arguments, timeout=limit, **{"check": False, **options})  # noqa: PLW1510


def start_command(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
    """Call `subprocess.Popen`."""
    return subprocess.Popen(*arguments, **options)


def run_accel(
    *words: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 60,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `accel` with these words, and return its exit code and output.

    environment: variables beside those of `clean_environment`.
    fresh: execute the console script, rather than fork the command where torch is loaded.

    Raises:
        subprocess.TimeoutExpired: it had not ended after `timeout` seconds (times the machine's patience).
    """
    variables, folder = clean_environment(environment), str(cwd or Path.cwd())
    if fresh or not forking():
        return run_command(
            [ACCEL, *words], env=variables, cwd=folder, timeout=timeout, capture_output=True, text=True
        )
    with TemporaryDirectory(prefix="accel-command-") as place:
        streams = [str(Path(place, name)) for name in ("stdout", "stderr")]
        code = _forked([ACCEL, *words], variables, folder, streams, patience(timeout))
        said = [Path(stream).read_text(encoding="utf-8", errors="strict") for stream in streams]
    if code is None:
        raise subprocess.TimeoutExpired([ACCEL, *words], patience(timeout), *said)
    return subprocess.CompletedProcess([ACCEL, *words], code, *said)


def _forked(
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: str,
    streams: Sequence[str],
    seconds: float,
) -> int | None:
    """Return the exit code; None for a command that was killed after `seconds`."""
    process = fork_command("accel_core.cli:main", words, variables, folder, streams)
    process.join(seconds)
    in_time = not process.is_alive()
    if not in_time:
        process.kill()
        process.join()
    code = process.exitcode
    process.close()
    return code if in_time else None


def fork_command(
    program: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: str,
    streams: Sequence[str],
    path: Sequence[str] | None = None,
) -> Any:
    """Start a program where torch is loaded already, and return its process.

    `program` is `module:function`, which takes `words` from `sys.argv`. `streams` are files for its output
    and errors. `path` is its import path after PYTHONPATH, by default that of this process.
    """
    given = program, list(words), dict(variables), folder, list(streams), path
    process = forking().Process(target=_work, args=given)
    process.start()
    return process


def _work(
    program: str,
    words: list[str],
    variables: dict[str, str],
    folder: str,
    streams: Sequence[str],
    path: Sequence[str] | None,
) -> None:
    """Be the command, in the forked process."""
    _redirect(streams)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if path is None:
        own = [place for place in sys.path if place not in inherited]
        path = [str(Path(words[0]).parent), *places, *own]
    else:
        path = [*places, *path]
    sys.path[:] = path
    sys.argv[:] = words
    importlib.invalidate_caches()
    code: Any = 0
    module, _, function = program.partition(":")
    try:
        getattr(importlib.import_module(module), function)()
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # as the interpreter does
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # a forked process skips these, too
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _redirect(streams: Sequence[str]) -> None:
    places = [
        (os.devnull, os.O_RDONLY),
        *((stream, os.O_CREAT | os.O_WRONLY | os.O_APPEND) for stream in streams),
    ]
    for number, (place, flags) in enumerate(places):
        file = os.open(place, flags)
        os.dup2(file, number)
        os.set_inheritable(number, True)
        if file != number:
            os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
