"""Where the agents of a job meet, and what can be known of the way there beforehand."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Final

from accel_core.errors import LaunchError
from accel_core.hookspecs import Job

__all__ = ["address_towards", "interface_towards", "meeting_point", "split"]

LOCAL: Final = "127.0.0.1"
PATIENCE: Final = 900.0
"""Seconds that nodes wait for each other."""
SIOCGIFADDR: Final = 0x8915
"""Linux: the IPv4 address of an interface."""


def meeting_point(job: Job) -> str:
    """Where the job's agents meet, host:port, checked as far as one node can.

    Raises:
        LaunchError: no such place, a port in use, or nobody there for 15 minutes.
    """
    if job.rendezvous is None and job.nodes > 1:
        raise LaunchError(
            f"{job.nodes} nodes were asked for, and no place to meet\n"
            "add --rendezvous HOST:PORT, an address of node 0 and a free port there, on each node"
        )
    host, port = split(job.rendezvous or f"{LOCAL}:0")
    endpoint = f"{host if job.nodes > 1 else LOCAL}:{port}"
    if job.node_rank == 0:
        _refuse_taken_port(endpoint)
    else:
        _await_host(endpoint)
    return endpoint


def split(endpoint: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise LaunchError(
            f"--rendezvous {endpoint!r} is not HOST:PORT\nfor example --rendezvous 10.0.0.1:29500"
        )
    return host, int(port)


def _refuse_taken_port(endpoint: str) -> None:
    port = split(endpoint)[1]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} of this machine cannot be used: {os.strerror(error.errno or 0).lower()}\n"
                f"take another, such as --rendezvous {split(endpoint)[0]}:{port + 1}, on every node"
            ) from error


def _await_host(endpoint: str) -> None:
    # In Python, because waiting inside torch's store cannot be interrupted.
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(split(endpoint), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"node 0 did not answer at {endpoint} for {PATIENCE:g} s: {error}\n"
                    "start the same command there with --node-rank 0, or correct --rendezvous"
                ) from error
            time.sleep(0.2)
        else:
            return


def address_towards(endpoint: str) -> str:
    """This machine's address on the way there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(split(endpoint))
        return str(probe.getsockname()[0])


def interface_towards(endpoint: str) -> str | None:
    """The network interface that leads to the other nodes; None if that cannot be told. Linux."""
    address = address_towards(endpoint)
    if sys.platform != "linux" or address.startswith("127."):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, name.encode().ljust(40, b"\0"))[20:24]
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(found) == address:
                return name
    return None
