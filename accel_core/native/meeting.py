"""Where the agents of a job meet, and what can be known of the way there beforehand."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from typing import Final

from accel_core.errors import LaunchError
from accel_core.hookspecs import Job

__all__ = ["interface_towards", "meeting_point"]

LOCAL: Final = "127.0.0.1"
SIOCGIFADDR: Final = 0x8915
"""Linux: the IPv4 address of an interface."""


def meeting_point(job: Job) -> tuple[str, int]:
    """Host and port where the job's agents meet.

    Raises:
        LaunchError: the job names no such place.
    """
    if job.rendezvous is None and job.nodes > 1:
        raise LaunchError(
            f"{job.nodes} nodes were asked for, and no place to meet\n"
            "add --rendezvous HOST:PORT, an address of node 0 and a free port there, on each node"
        )
    host, _, port = (job.rendezvous or f"{LOCAL}:0").rpartition(":")
    if not host or not port.isdecimal():
        raise LaunchError(
            f"--rendezvous {job.rendezvous!r} is not HOST:PORT\nfor example --rendezvous 10.0.0.1:29500"
        )
    return host if job.nodes > 1 else LOCAL, int(port)


def interface_towards(host: str, port: int) -> str | None:
    """The network interface that leads to the other nodes; None if that cannot be told. Linux."""
    if sys.platform != "linux":
        return None
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                if fcntl.ioctl(probe, SIOCGIFADDR, name.encode().ljust(40, b"\0"))[20:24] == address:
                    return name
    return None
