"""Two hosts on one machine, and the launcher of one node on each."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from accel_testing import hosts as made
from accel_testing.commands import ACCEL, clean_environment
from accel_testing.patience import patience

# The second node's address sorts before the first's, so that an order by address would show.
ADDRESSES = {"host-a": "10.77.0.9", "host-b": "10.77.0.10"}
SECONDS = patience(150)


class Host:
    """A host and the launcher of one node on it."""

    def __init__(self, host: made.Host, node: int, folder: Path) -> None:
        self._host, self.node = host, node
        self.name, self.cable = host.name, host.cable
        self._folder = folder
        self._file = folder / f"{self.name}.txt"
        self._launcher: subprocess.Popen[bytes] | None = None

    def launch(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        """Start `accel launch` with words; a host that comes back writes on."""
        accel = (ACCEL, "launch", "--launcher", "torchrun", "--device", "cpu", "-n", "1", "--nodes", "2")
        place = ("--node-rank", str(self.node), "--rendezvous", f"{ADDRESSES['host-a']}:29512")
        with self._file.open("a") as told:
            self._launcher = subprocess.Popen(
                self._host.command(*accel, *place, *words),
                env=clean_environment(environment),
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
        left = self._host.processes
        wait_for(lambda: not left(), lambda: f"{self.name} has orphans: {left()}")
        return code

    def dies(self) -> None:
        self._host.dies()
        if self._launcher is not None:
            self._launcher.wait(SECONDS)


@contextmanager
def two_hosts(make_hosts: Callable[..., Any], folder: Path) -> Iterator[Sequence[Host]]:
    """Give two hosts; what is left on them is killed."""
    with make_hosts(ADDRESSES) as namespaces:
        hosts = [Host(host, node, folder) for node, host in enumerate(namespaces.values())]
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
