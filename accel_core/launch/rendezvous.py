"""Addresses at which the agents of a job meet."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from accel_core.contract.config import host_and_port
from accel_core.contract.job import Job
from accel_core.errors import LaunchError
from accel_core.launch.meeting import agree_on_port, told_soon

LOCAL: Final = "127.0.0.1"
SIOCGIFADDR: Final = 0x8915
"""Linux: the IPv4 address of an interface."""
IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")
"""Linux: a line for each address, with its interface at the end."""


def rendezvous_address(job: Job, seconds: float) -> tuple[str, int]:
    """Return host and port at which the job's agents meet.

    seconds: that nodes wait for each other.

    Raises:
        LaunchError: the job names no such place.
    """
    require_rendezvous(job.nodes, job.rendezvous)
    try:
        host, port = host_and_port(job.rendezvous or f"{LOCAL}:0", 1)
    except ValueError as error:
        raise LaunchError(f"{error}\nfor example --rendezvous 10.0.0.1:29500") from None
    if job.nodes == 1:
        return LOCAL, port
    _resolve(host, job, seconds)
    if port == 0:
        port = agree_on_port(host, job.id, seconds, serves=job.node_rank == 0)
    return host, port


def require_rendezvous(nodes: int, rendezvous: str | None) -> None:
    """Raise LaunchError for several nodes without a rendezvous."""
    if rendezvous is None and nodes > 1:
        raise LaunchError(
            f"{nodes} nodes were asked for, without an address at which they meet\n"
            "add --rendezvous HOST:PORT, an address of node 0 and a free port there, on each node"
        )


def _resolve(host: str, job: Job, seconds: float) -> None:
    """Wait until the host's name is known here, or raise.

    The name of a pod, or of a machine that just starts, is not known at once.
    """
    deadline = time.monotonic() + seconds
    with told_soon(f"node {job.node_rank} waits until this machine knows {host!r}, the host of node 0"):
        while True:
            try:
                socket.getaddrinfo(host, None)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"--rendezvous {job.rendezvous}: this machine could not resolve {host!r} for"
                        f" {seconds:.0f} s ({error})\nname an address of node 0 that every node can reach"
                    ) from error
                time.sleep(0.5)
            else:
                return


def address_towards(host: str, port: int) -> str | None:
    """Return the address by which other nodes know this one; None if unknown."""
    with suppress(OSError):
        places = {place[0]: place[4] for place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)}
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError, KeyError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(places[family])
                address: str = probe.getsockname()[0]
                return address
    return None


def interface_towards(host: str, port: int) -> str | None:
    """Return the interface that leads to the other nodes; None if unknown.

    Linux only.
    """
    address = address_towards(host, port)
    if sys.platform != "linux" or address is None:
        return None
    if ":" in address:
        return _interface_of_ipv6(address)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                packed = fcntl.ioctl(probe, SIOCGIFADDR, name.encode().ljust(40, b"\0"))[20:24]
                if packed == socket.inet_aton(address):
                    return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with suppress(OSError):
        for line in IPV6_ADDRESSES.read_text(encoding="ascii").splitlines():
            number, *_, name = line.split()
            if number == packed:
                return name
    return None
