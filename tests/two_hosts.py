"""Two hosts on one machine: network namespaces with a cable between them, and a host name each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from accel_command import ACCEL, clean_environment

NEEDED = [
    pytest.mark.multinode,
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0, reason="making namespaces needs root"
    ),
    pytest.mark.skipif(shutil.which("ip") is None, reason="the ip command (iproute2) is missing"),
]
"""Marks of tests that use them."""

# The second node's address sorts before the first's, so that an order by address would show.
ADDRESSES = ("10.77.0.9", "10.77.0.10")
SECONDS = 150
"""Patience, on a busy machine too."""


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Give the names of two network namespaces that are joined by a cable."""
    names = (f"accel-a-{os.getpid()}", f"accel-b-{os.getpid()}")

    def ip(*words: str) -> None:
        ended = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if ended.returncode:
            pytest.skip(f"ip {' '.join(words)}: {ended.stderr.strip()}")

    with ExitStack() as undo:
        for name in names:
            ip("netns", "add", name)
            undo.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        cable = "link add accel0 netns {} type veth peer name accel0 netns {}"
        ip(*cable.format(*names).split())
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "accel0")
            ip("-n", name, "link", "set", "accel0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


class Host:
    """A namespace with a host name, and the launcher of one node in it."""

    def __init__(self, namespace: str, node: int, folder: Path) -> None:
        self.namespace, self.node = namespace, node
        self.name = f"host-{'ab'[node]}"
        self._folder = folder
        self._file = folder / f"{self.name}.txt"
        self._launcher: subprocess.Popen[bytes] | None = None

    def launch(self, *words: str) -> None:
        """Start `accel launch` with words; a host that comes back writes on."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name)
        accel = (ACCEL, "launch", "--launcher", "torchrun", "--device", "cpu", "-n", "1", "--nodes", "2")
        place = ("--node-rank", str(self.node), "--rendezvous", f"{ADDRESSES[0]}:29512")
        with self._file.open("a") as told:
            self._launcher = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *named, *accel, *place, *words],
                env=clean_environment(),
                cwd=self._folder,
                stdout=told,
                stderr=told,
            )

    def said(self) -> str:
        return self._file.read_text()

    def ends(self) -> int:
        """Return the exit code of the launcher; the host has no process any more."""
        assert self._launcher is not None
        try:
            code = self._launcher.wait(SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher of {self.name} goes on\n{self.said()}")
        wait_for(lambda: not self.processes(), lambda: f"{self.name} has orphans: {self.processes()}")
        return code

    def processes(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, check=True)
        return [int(process) for process in listed.stdout.split()]

    def dies(self) -> None:
        """Kill each process at once, as a power failure does."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self._launcher is not None:
            self._launcher.wait(SECONDS)

    def cable(self, state: str) -> None:
        """Set the link up or down."""
        subprocess.run(["ip", "-n", self.namespace, "link", "set", "accel0", state], check=True)


@contextmanager
def two_hosts(folder: Path) -> Iterator[Sequence[Host]]:
    """Give two hosts; kill what is left on them."""
    with namespaces() as names:
        hosts = [Host(name, node, folder) for node, name in enumerate(names)]
        try:
            yield hosts
        finally:
            for host in hosts:
                host.dies()


def wait_for(is_there: Callable[[], object], about: Callable[[], str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_there():
        assert time.monotonic() < deadline, about()
        time.sleep(0.1)
