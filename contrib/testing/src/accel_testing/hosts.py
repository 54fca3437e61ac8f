"""Hosts on one machine: network namespaces of Linux, each with a host name."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from attrs import frozen

__all__ = ["Host", "make_hosts", "missing"]

CABLE: Final = "cable"
"""A host's end of its link to the switch."""


def missing() -> str:
    """Return the reason why no hosts can be made here; empty if they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    absent = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if absent:
        return f"the command {absent[0]} is missing (Debian: iproute2, util-linux)"
    return _run("unshare", "--net", "--uts", "true").stderr.strip()


@frozen
class Host:
    """A host: what its commands start sees only its network, and is killed with it."""

    name: str
    address: str
    namespace: str

    def command(self, *words: str) -> list[str]:
        """Return the words that run a command on this host."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name)
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *named, *words]

    def processes(self, text: str = "") -> dict[int, str]:
        """Return the processes on this host whose command lines have a text, by number."""
        found = {}
        for number in map(int, _ip("netns", "pids", self.namespace).split()):
            with suppress(OSError):  # it has ended meanwhile
                line = (
                    Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                if text in line:
                    found[number] = line
        return found

    def dies(self) -> None:
        """Kill each process on this host, as a power failure does."""
        while running := self.processes():
            for number in running:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

    def cable(self, state: str) -> None:
        """Set the link to the switch "up" or "down"."""
        _ip("-n", self.namespace, "link", "set", CABLE, state)


@contextmanager
def make_hosts(addresses: Mapping[str, str]) -> Iterator[dict[str, Host]]:
    """Make hosts that reach each other.

    addresses: name -> IPv4 address, all of one /24 network.
    What still runs on them in the end is killed. Needs what `missing` names.

    Raises:
        OSError: a namespace or a link cannot be made.
    """
    _remove_leftovers()
    switch = f"accel-{os.getpid()}"
    hosts = {name: Host(name, address, f"{switch}-{name}") for name, address in addresses.items()}
    with ExitStack() as undo:
        _add(switch, undo)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for index, host in enumerate(hosts.values()):
            _add(host.namespace, undo)
            undo.callback(host.dies)
            port = ("peer", "name", f"port{index}", "netns", switch)
            _ip("link", "add", CABLE, "netns", host.namespace, "type", "veth", *port)
            _ip("-n", switch, "link", "set", f"port{index}", "master", "switch", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", CABLE)
            for link in (CABLE, "lo"):
                _ip("-n", host.namespace, "link", "set", link, "up")
        yield hosts


def _remove_leftovers() -> None:
    """Remove hosts whose maker was killed, as by the time limit of a test run, and could not."""
    for line in _ip("netns", "list").splitlines():
        name = line.partition(" ")[0]
        maker = re.match(r"accel-(\d+)", name)
        if maker and not Path("/proc", maker[1]).exists():
            Host(name, "", name).dies()
            _run("ip", "netns", "delete", name)  # another test run may be removing it too


def _add(namespace: str, undo: ExitStack) -> None:
    _ip("netns", "add", namespace)
    undo.callback(_ip, "netns", "delete", namespace)


def _ip(*words: str) -> str:
    ended = _run("ip", *words)
    if ended.returncode:
        raise OSError(f"ip {' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)
