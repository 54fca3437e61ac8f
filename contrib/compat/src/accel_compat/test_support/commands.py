"""Commands that tests start, and what they print."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final, TextIO

from attrs import define

from accel_compat.activation import SURFACE
from accel_compat.test_support.skipping import device_count, pytest_xdist_worker_id


class SubprocessCallException(Exception):  # noqa: N818 - Accelerate's name
    """A command ended with an exit code that is not 0."""


@define
class RunOutput:
    """Lines that a command printed, and its exit code."""

    returncode: int
    stdout: list[str]
    stderr: list[str]


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return `accelerate launch` with these flags: `--NAME`, or `--NAME=VALUE`."""
    flags = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in kwargs.items()
        if value is not None
    ]
    return ["accelerate", "launch", *flags]


DEFAULT_LAUNCH_COMMAND: Final = get_launch_command(num_processes=device_count, monitor_interval=0.1)


def execute_subprocess_async(
    cmd: Sequence[Any],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float | None = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Run a command and print its output while it comes.

    Raises:
        RuntimeError: it failed; the message has its stderr.
        TimeoutError: it has not ended after `timeout` seconds; it is killed then.
    """
    command = [str(part) for part in cmd]
    if echo:
        print("\nRunning: ", " ".join(command))  # noqa: T201
    output = asyncio.run(asyncio.wait_for(_stream(command, env, stdin, quiet), timeout))
    if output.returncode:
        said = "\n".join(output.stderr)
        raise RuntimeError(
            f"'{' '.join(command)}' failed with returncode {output.returncode}\n\n"
            f"The combined stderr from workers follows:\n{said}"
        )
    return output


async def _stream(
    command: Sequence[str], env: Mapping[str, str] | None, stdin: Any, quiet: bool
) -> RunOutput:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=env, stdin=stdin, stdout=pipe, stderr=pipe)
    output = RunOutput(0, [], [])

    async def read(stream: Any, lines: list[str], to: TextIO, label: str) -> None:
        async for line in stream:
            lines.append(line.decode("utf-8").rstrip())
            if not quiet:
                print(label, lines[-1], file=to)

    try:
        await asyncio.gather(
            read(process.stdout, output.stdout, sys.stdout, "stdout:"),
            read(process.stderr, output.stderr, sys.stderr, "stderr:"),
        )
        output.returncode = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return output


def run_command(command: Sequence[Any], return_stdout: bool = False, env: Any = None) -> str | None:
    """Run a command; return what it printed if `return_stdout`.

    Raises:
        SubprocessCallException: it failed; the message has its output.
    """
    parts = [str(part) for part in command]
    try:
        output = subprocess.check_output(parts, stderr=subprocess.STDOUT, env=env or os.environ.copy())  # noqa: S603
    except subprocess.CalledProcessError as error:
        raise SubprocessCallException(
            f"Command `{' '.join(parts)}` failed with the following error:\n\n{error.output.decode()}"
        ) from error
    return output.decode("utf-8") if return_stdout else None


def get_torch_dist_unique_port() -> int:
    """Return a port for this worker of pytest-xdist."""
    return 29500 + pytest_xdist_worker_id()


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path below the folder of the package `accelerate`."""
    return Path(SURFACE, *components)


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Fail unless the block raises this exception, with `msg` in its text."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, exception_class):
            raise AssertionError(
                f"Expected exception of type {exception_class} but got {type(error)}"
            ) from error
        if msg is not None and msg not in str(error):
            raise AssertionError(f"Expected message '{msg}' to be in exception but got '{error}'") from error
        return
    raise AssertionError(f"Expected exception of type {exception_class} but ran without issue.")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return what a call prints to stdout."""
    with redirect_stdout(io.StringIO()) as output:
        func(*args, **kwargs)
    return output.getvalue()
