"""The actor: runs a command on its node, and sends back what it prints."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

__all__ = ["Node", "Output"]

Output = list[tuple[str, bytes]]
"""Whole lines, in order: stream (stdout or stderr), bytes."""
BOOT: Final = """
import ctypes, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
os.execv(sys.executable, sys.argv[2:])
"""
"""Program that becomes the command, which the kernel ends with the actor.

Ray's workers block and ignore SIGINT, and their children would too.
"""
OTHER_ENGINES: Final = ("SLURM_", "PMI_", "PMIX_", "OMPI_")
"""Variables of a scheduler that has started Ray itself."""
IDLE_SECONDS: Final = 2.0
"""Time for which output is awaited once the command has ended."""


class Node:
    """An actor on one node of the job."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None

    def address(self) -> tuple[str, str]:
        """Return this node's address, and its host name."""
        import ray

        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return node, socket.gethostname()

    def run(
        self, words: Sequence[str], variables: Mapping[str, str], folder: str | None
    ) -> Iterator[Output | int]:
        """Run this interpreter with words; yield its output, last its exit code.

        folder: where it starts; None: where Ray has unpacked the job's files.
        """
        if folder is not None and not Path(folder).is_dir():
            text = f"accel: node {socket.gethostname()} has no folder {folder}\n"
            yield [("stderr", (text + "share it, or send a folder with --ray.working-dir .\n").encode())]
            yield 1
            return
        process = self._start(words, variables, folder)
        printed: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert stream is not None
            threading.Thread(target=_read, args=(name, stream, printed), daemon=True).start()
        open_streams = 2
        while open_streams:
            try:
                found = [printed.get(timeout=IDLE_SECONDS)]
            except queue.Empty:
                if process.poll() is not None:
                    break  # another process holds the stream
                continue
            while not printed.empty():
                found.append(printed.get())
            open_streams -= found.count(None)
            if lines := [line for line in found if line is not None]:
                yield lines
        yield process.wait()

    def send(self, number: int) -> None:
        """Send a signal to the command; to one that has not begun, when it begins."""
        self._signal = number
        if self._process is not None:
            self._process.send_signal(number)

    def _start(
        self, words: Sequence[str], variables: Mapping[str, str], folder: str | None
    ) -> subprocess.Popen[bytes]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(OTHER_ENGINES)}
        for name in ("RANK", "WORLD_SIZE"):
            kept.pop(name, None)
        boot = [sys.executable, "-c", BOOT, str(os.getpid()), sys.executable, *words]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(  # noqa: S603  the user's own words
            boot,
            env={**kept, **variables},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        if self._signal is not None:
            self._process.send_signal(self._signal)
        return self._process


def _read(name: str, stream: IO[bytes], printed: queue.SimpleQueue[tuple[str, bytes] | None]) -> None:
    """Put whole lines into the queue, and None at the end."""
    rest = b""
    with suppress(OSError, ValueError), stream:
        while data := os.read(stream.fileno(), 1 << 16):
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # progress bars end lines by \r
            if end:
                printed.put((name, rest + data[:end]))
                rest = b""
            rest += data[end:]
    if rest:
        printed.put((name, rest))
    printed.put(None)
