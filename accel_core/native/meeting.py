"""Where the agents of a job meet, and what can be known of the way there beforehand."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any, Final

from accel_core.errors import LaunchError
from accel_core.hookspecs import Job

__all__ = ["interface_towards", "meeting_point"]

LOCAL: Final = "127.0.0.1"
PATIENCE: Final = 900.0
"""Seconds that nodes wait for each other."""
SIOCGIFADDR: Final = 0x8915
"""Linux: the IPv4 address of an interface."""


def meeting_point(job: Job) -> dict[str, Any]:
    """The rendezvous arguments of torch's LaunchConfig, checked as far as one node can."""
    if job.rendezvous is None and job.nodes == 1:
        return _c10d(f"{LOCAL}:0", LOCAL, True)
    if job.rendezvous is None:
        raise LaunchError(
            f"{job.nodes} nodes were asked for, and no place to meet\n"
            "add --rendezvous HOST:PORT, an address of node 0 and a free port there, on each node"
        )
    host, port = _split(job.rendezvous)
    host = host if job.nodes > 1 else LOCAL
    endpoint = f"{host}:{port}"
    if job.node_rank == 0:
        _refuse_taken_port(endpoint)
    else:
        _await_host(endpoint)
    if job.max_restarts:
        return _c10d(endpoint, host if job.node_rank == 0 else _address_towards(endpoint), job.node_rank == 0)
    # Without restarts the static kind will do, and keeps --node-rank; c10d sorts nodes by address.
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": endpoint,
        "rdzv_configs": {"rank": job.node_rank, "timeout": int(PATIENCE)},
    }


def _c10d(endpoint: str, address: str, is_host: bool) -> dict[str, Any]:
    # Left to itself torch guesses is_host from host names, and two nodes wait for a third party.
    return {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": endpoint,
        "rdzv_configs": {"is_host": is_host, "timeout": int(PATIENCE)},
        "local_addr": address,
    }


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise LaunchError(
            f"--rendezvous {endpoint!r} is not HOST:PORT\nfor example --rendezvous 10.0.0.1:29500"
        )
    return host, int(port)


def _refuse_taken_port(endpoint: str) -> None:
    port = _split(endpoint)[1]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} of this machine cannot be used: {os.strerror(error.errno or 0).lower()}\n"
                f"take another, such as --rendezvous {_split(endpoint)[0]}:{port + 1}, on every node"
            ) from error


def _await_host(endpoint: str) -> None:
    # In Python, because waiting inside torch's store cannot be interrupted.
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(_split(endpoint), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"node 0 did not answer at {endpoint} for {PATIENCE:g} s: {error}\n"
                    "start the same command there with --node-rank 0, or correct --rendezvous"
                ) from error
            time.sleep(0.2)
        else:
            return


def _address_towards(endpoint: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_split(endpoint))
        return str(probe.getsockname()[0])


def interface_towards(endpoint: str) -> str | None:
    """The network interface that leads to the other nodes; None if that cannot be told. Linux."""
    address = _address_towards(endpoint)
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
