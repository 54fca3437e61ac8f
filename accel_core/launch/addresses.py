"""Addresses at which the launchers of a job meet."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Final

from accel_core.contract.config import host_and_port
from accel_core.contract.job import Job
from accel_core.distributed.progress import show_progress
from accel_core.errors import LaunchError

LOCAL: Final = "127.0.0.1"
FIRST_NOTICE: Final = 3.0
"""Seconds until a log names the nodes that are missing."""
SIOCGIFADDR: Final = 0x8915
"""Linux: the IPv4 address of an interface."""


def rendezvous_address(job: Job) -> tuple[str, int]:
    """Return host and port at which the job's nodes meet.

    Raises:
        LaunchError: the job's rendezvous is missing or invalid.
    """
    require_rendezvous(job.nodes, job.rendezvous)
    try:
        host, port = host_and_port(job.rendezvous or f"{LOCAL}:0", job.nodes)
    except ValueError as error:
        raise LaunchError(f"{error}\nfor example --rendezvous 10.0.0.1:29500") from None
    return (LOCAL, port) if job.nodes == 1 else (host, port)


def wait_for_node_0(job: Job, place: tuple[str, int], seconds: float) -> None:
    """Return once node 0 answers; on node 0, once this machine can resolve its own name.

    Waiting here lets signal handlers run, which torch's own wait blocks. The name of a starting pod cannot be
    resolved at once.

    Raises:
        LaunchError: the wait took longer than `seconds`.
    """
    if job.nodes == 1:
        return
    host, port = place
    awaited = f"node 0 at {host}:{port}" if job.node_rank else f"its own name, {host}, to be known"
    deadline = time.monotonic() + seconds
    with show_waiting(f"node {job.node_rank} waits for {awaited}"):
        while True:
            try:
                if job.node_rank:
                    socket.create_connection(place, 1.0).close()
                else:
                    socket.getaddrinfo(host, port)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise not_met(job, place, error) from error
                time.sleep(0.1)
            else:
                return


def not_met(job: Job, place: tuple[str, int], error: Exception) -> LaunchError:
    """Return the error of a node that cannot reach the others."""
    cause = str(error).partition("\n")[0]
    return LaunchError(
        f"node {job.node_rank} of {job.nodes} could not meet the others at {place[0]}:{place[1]}: {cause}\n"
        "check --rendezvous (an address of node 0, a port that is free there), and that each node "
        "was started, with its own --node-rank"
    )


def require_rendezvous(nodes: int, rendezvous: str | None) -> None:
    """Raise LaunchError for several nodes without a rendezvous."""
    if rendezvous is None and nodes > 1:
        raise LaunchError(
            f"{nodes} nodes were asked for, without an address at which they meet\n"
            "add --rendezvous HOST:PORT, an address of node 0 and a free port there, on each node"
        )


def show_waiting(text: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Return a context that shows that a node waits for others; a log shows it from the third second on."""
    return show_progress(text, main_process_only=False, tell_after=FIRST_NOTICE)


def address_towards(host: str, port: int) -> str | None:
    """Return this machine's address on the route to `host`; None if unknown."""
    with suppress(OSError):
        for family, *_, place in sorted(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                address: str = probe.getsockname()[0]
                return address
    return None


def interface_towards(host: str, port: int) -> str | None:
    """Return the interface on the route to `host`; None if it has no IPv4 address, or not on Linux."""
    address = address_towards(host, port)
    if sys.platform != "linux" or address is None or ":" in address:
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                found = fcntl.ioctl(probe, SIOCGIFADDR, name.encode().ljust(40, b"\0"))[20:24]
                if found == socket.inet_aton(address):
                    return name
    return None
