"""End requests to a store whose machine is silent.

A request to a store on a machine that is cut off lasts as long as the network stack retries: 15 minutes.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Container

    from torch.distributed.distributed_c10d import Store

FAILING_SECONDS: Final = 5.0
"""Seconds for the store to answer a failing rank that asks which calls the other ranks make."""
LONGEST_SECONDS: Final = 2_000_000.0
"""The largest number of seconds that fits into TCP_USER_TIMEOUT, in milliseconds."""
LONGEST_PAUSE: Final = 32_767
"""The largest number of seconds that Linux takes for TCP_KEEPIDLE and TCP_KEEPINTVL."""


def end_silent(store: Store, seconds: float) -> None:
    """Make requests of this process to a store raise RuntimeError if its machine is silent for `seconds`.

    Changes open connections only, and on Linux only.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    if port is None or sys.platform != "linux":  # a store in files, or in this process
        return
    peers = {(address, port) for address in _addresses(store.host)}  # type: ignore[attr-defined]
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the file was closed meanwhile, or is not a connection
            number = int(entry.name)
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                _limit(number, peers, seconds)


@cache
def _addresses(host: str) -> frozenset[str]:
    """Return the addresses of a host.

    Addresses are looked up once, after the store has been reached: a name server may not answer when a link
    is cut.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return frozenset(_plain(address[0]) for *_, address in found)


def _plain(address: object) -> str:
    return str(address).removeprefix("::ffff:")  # torch connects to IPv4 addresses as IPv6


def _limit(number: int, peers: Container[tuple[str, int]], seconds: float) -> None:
    seconds = min(seconds, LONGEST_SECONDS)
    blocks = os.get_blocking(number)
    with socket.socket(fileno=os.dup(number)) as connection:
        os.set_blocking(number, blocks)  # socket.socket sets it by socket.setdefaulttimeout
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        address, port = connection.getpeername()[:2]
        if (_plain(address), port) not in peers:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
        # TCP_USER_TIMEOUT ends unacknowledged requests; keepalive probes end the wait for an answer.
        pause = min(max(1, int(seconds / 3)), LONGEST_PAUSE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
